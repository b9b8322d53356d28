// Elements, numbers and the address of the view. Text from runs enters the page only as text.

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e5 || (size && size < 1e-3)) return value.toExponential(1).replace("e+", "e");
  return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(3)));
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

export async function ask(path, body) {
  const options = body && { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  const answer = await fetch(path, options);
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error || answer.statusText);
  return answer;
}

// The view as it stands in the address: everything that someone else needs to see the same.
const DEFAULTS = {
  view: "charts", runs: "", focus: "", x: "steps", smooth: "0", from: "", to: "", search: "", curves: "",
  run: "", file: "", order: "saved", failed: "", text: "", all: "", prompt: "", place: "",
};
export const state = { ...DEFAULTS };

export function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(DEFAULTS)) state[name] = words.get(name) ?? DEFAULTS[name];
}

export function change(values) {
  const isOtherView = "view" in values && values.view !== state.view;
  Object.assign(state, values);
  const words = new URLSearchParams(Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]));
  history[isOtherView ? "pushState" : "replaceState"](null, "", `#${words}`);
}
