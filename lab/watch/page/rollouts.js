// Rollouts of a run: a list with filters, and one of them as a conversation and as tokens.
import { ask, byId, change, make, number, state } from "./dom.js";

const NATS = 5; // surprise of a fully colored token
let isStale = true, listed = "", opened = "", found = [], before = "", refresh = () => {};

export function startRollouts(soon) {
  refresh = () => { isStale = true; soon(); };
  const set = (values) => { change({ place: "", ...values }); refresh(); };
  byId("rollouts").querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  byId("r-run").addEventListener("change", (event) => set({ run: event.target.value, file: "", prompt: "" }));
  byId("r-file").addEventListener("change", (event) => set({ file: event.target.value }));
  byId("r-order").addEventListener("change", (event) => set({ order: event.target.value }));
  byId("r-text").addEventListener("input", (event) => set({ text: event.target.value }));
  byId("r-failed").addEventListener("change", (event) => set({ failed: event.target.checked ? "1" : "" }));
  byId("r-all").addEventListener("change", (event) => set({ all: event.target.checked ? "1" : "", prompt: "" }));
  byId("r-prompt").addEventListener("click", () => set({ prompt: "", all: "" }));
  byId("r-more").addEventListener("click", () => readList(before));
  for (const [id, step] of [["r-before", -1], ["r-after", 1]])
    byId(id).addEventListener("click", () => {
      const select = byId("r-file"), place = select.selectedIndex - step; // newest first
      if (select.options[place]) set({ file: select.options[place].value });
    });
  addEventListener("popstate", () => { isStale = true; });
}

// Read again what the address asks for; the newest step moves on while a run goes on.
export async function readRollouts(runs) {
  const select = byId("r-run");
  if (select.options.length !== runs.length || runs.some((run, place) => select.options[place].value !== run.id))
    select.replaceChildren(...runs.map((run) => make("option", { value: run.id }, run.name)));
  const run = runs.find((one) => one.id === state.run) || runs[0];
  if (!run) return;
  select.value = run.id;
  byId("r-order").value = state.order;
  byId("r-order").disabled = state.all === "1"; // newest first
  byId("r-failed").checked = state.failed === "1";
  byId("r-all").checked = state.all === "1";
  if (byId("r-text").value !== state.text) byId("r-text").value = state.text;
  byId("r-prompt").hidden = state.prompt === "";
  if (isStale || (state.file === "" && state.all === "")) await readList("");
  await readOne();
}

async function readList(from) {
  const run = byId("r-run").value;
  const { file, order, text, failed, all, prompt } = state;
  isStale = false;
  const answer = await (await ask(`/api/rollouts?${new URLSearchParams({ run, file, order, text, failed, all, prompt, before: from })}`).catch((error) => { isStale = true; throw error; })).json();
  const files = [...answer.files].reverse(), select = byId("r-file");
  if (files.length !== select.options.length || select.options[0]?.value !== files[0])
    select.replaceChildren(...files.map((name) => make("option", { value: name }, name.replace(/^step-0*(\d+)/, "$1").replace(".jsonl", "").replace("-untrained-", " untrained "))));
  select.value = answer.file;
  for (const id of ["r-file", "r-before", "r-after"]) byId(id).disabled = all === "1" || files.length < 2;
  found = from ? [...found, ...answer.rollouts] : answer.rollouts;
  before = answer.before;
  byId("r-more").hidden = !before;
  const count = Math.max(answer.count, found.length);
  byId("r-count").textContent = [
    files.length ? `${count} rollout${count === 1 ? "" : "s"}` : "This run has saved no rollouts (logger.save_rollouts)",
    found.length < count ? `the first ${found.length} are listed` : "", before ? `searched back to ${before}` : "",
    answer.damaged ? `${answer.damaged} damaged lines are left out` : "", prompt ? "one prompt over time" : "",
  ].filter(Boolean).join("; ");
  const key = JSON.stringify(found.map((head) => [run, placeOf(head)]));
  if (key !== listed) byId("r-list").replaceChildren(...found.map(item));
  listed = key;
  mark();
}

const placeOf = (head) => `${head.file}:${head.line}`;
const mark = () => { for (const one of byId("r-list").children) one.firstChild.setAttribute("aria-current", String(one.dataset.place === state.place)); };

function item(head) {
  const button = make("button", { type: "button" },
    make("b", {}, number(head.reward)),
    make("span", { className: head.isFailed ? "bad" : "soft" }, `${head.status}, ${head.tokens} tokens, ${head.turns} turn${head.turns === 1 ? "" : "s"}, update ${head.update}, prompt ${head.group}`),
    make("span", { className: "line" }, head.question), make("span", { className: "line" }, head.error || head.answer || "(nothing said)"));
  const one = make("li", {}, button);
  one.dataset.place = placeOf(head);
  button.addEventListener("click", async () => {
    change({ place: placeOf(head), run: byId("r-run").value });
    mark();
    await readOne();
    byId("r-one").focus({ preventScroll: innerWidth > 900 });
  });
  return one;
}

async function readOne() {
  const box = byId("r-one"), run = byId("r-run").value, key = `${run} ${state.place}`;
  if (key === opened) return;
  opened = key;
  if (!state.place) return box.replaceChildren(make("p", { className: "soft" }, "Choose a rollout of the list."));
  try {
    const one = await (await ask(`/api/rollout?${new URLSearchParams({ run, place: state.place })}`)).json();
    if (key === opened) box.replaceChildren(...whole(one, run));
  } catch (error) {
    box.replaceChildren(make("p", { className: "bad" }, error.message));
  }
}

function whole(one, run) {
  const over = make("button", { type: "button" }, "This prompt over time");
  over.addEventListener("click", () => { change({ prompt: placeOf(one), all: "1", text: "", failed: "" }); refresh(); });
  const rewards = Object.entries(one.rewards).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const details = (title, isOpen, ...children) => make("details", { open: isOpen }, make("summary", {}, title), ...children);
  const examples = one.messages.filter((message) => message.isExample), others = one.messages.filter((message) => !message.isExample);
  return [
    make("h2", {}, `Reward ${number(one.reward)}, update ${one.update}, rollout ${one.id}`),
    make("p", { className: "soft" }, `${one.status}, ${one.tokens} tokens, ${one.turns} turn${one.turns === 1 ? "" : "s"}${rewards ? `; ${rewards}` : ""}`),
    one.error ? make("p", { className: "bad" }, one.error) : "", over,
    examples.length ? details(`${examples.length} messages of worked examples`, false, ...examples.map((message) => said(message, run))) : "",
    ...others.map((message) => said(message, run)),
    details("Tokens", true, make("p", { className: "soft" }, "Color: how unlikely a sampled token was for the engine. Gray: not sampled."), tokens(one, run)),
    details("Row of the data", false, make("pre", {}, one.example)),
  ];
}

// An image of the run, or a sentence in its place.
function image({ digest, name }, run) {
  const picture = make("img", { className: "picture", alt: name, title: name, loading: "lazy" });
  picture.addEventListener("error", () => picture.replaceWith(make("span", { className: "soft" }, `${name} (no such file in the run's folder media)`)));
  picture.src = `/api/image?${new URLSearchParams({ run, digest })}`;
  return picture;
}

function said(message, run) {
  const text = make("div", { className: "text" }, ...message.pieces.map((piece) => (piece.digest ? image(piece, run) : piece.text)), ...message.calls.map((call) => make("span", { className: "call" }, `→ ${call}`)), ...message.errors.map((error) => make("span", { className: "bad" }, `✗ ${error}`)));
  return make("div", { className: `message ${["system", "user", "assistant", "tool"].includes(message.role) ? message.role : ""}` }, make("div", { className: "role" }, message.role), text);
}

const visible = (text) => text.replace(/\n/g, "⏎\n").replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);

function tokens(one, run) {
  const box = make("div", { className: "tokens" });
  for (const [turn, call] of one.calls.entries()) {
    for (const token of call.prompt) {
      if (token.digest) box.append(make("span", { className: "masked image" }, image(token, run), ` ${token.tokens} tokens`));
      else box.append(make("span", { className: "masked", title: `id ${token[0]}` }, visible(token[1])));
    }
    box.append(make("span", { className: "turn" }, `turn ${turn}`));
    for (const [id, text, logprob] of call.sampled) {
      const token = make("span", { className: "sampled", title: `id ${id}, logprob ${logprob.toFixed(3)}, probability ${(100 * Math.exp(logprob)).toFixed(1)} %` }, visible(text));
      const share = Math.min(1, -logprob / NATS);
      if (share > 0.02) token.style.background = `rgba(var(--plus), ${(0.9 * share).toFixed(3)})`;
      box.append(token);
    }
    box.append(make("span", { className: "ends" }, `┃${call.finish === "stop" ? "" : ` ${call.finish} `}`));
  }
  if (one.isCut) box.append(make("span", { className: "ends" }, " more tokens are left out"));
  return box;
}
