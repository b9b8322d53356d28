// The live page: table of runs, alarms, charts. It asks again while it is visible, and then only for what changed.
import { ask, byId, change, duration, make, number, readAddress, state } from "./dom.js";
import { Chart, NUM_COLORS, Store, readPalette, swatch } from "./charts.js";
import { readRollouts, startRollouts } from "./rollouts.js";

const EVERY_MS = 3000, READING_MS = 1000, SOON_MS = 60, DRAW_MS = 3000, MAX_FOUND = 60, CHOSEN_AT_FIRST = 8;
const COLUMNS = [
  { key: "name", title: "run" },
  { key: "state", title: "state" },
  { key: "update", title: "update", text: (run) => (run.update === null ? "–" : `${run.update}${run.updates ? ` / ${run.updates}` : ""}`) },
  { key: "reward", title: "reward", text: (run) => number(run.reward) },
  { key: "heldOut", title: "held-out", text: (run) => number(run.heldOut) },
  { key: "speed", title: "tokens/s", text: (run) => number(run.speed) },
  { key: "alarms", title: "alarms", text: (run) => String(run.alarms.length || (run.damaged ? `${run.damaged} bad lines` : "")), value: (run) => run.alarms.length },
  { key: "age", title: "last step", text: (run) => `${duration(run.age)} ago` },
];
const store = new Store(), charts = new Map(), seen = new Set(), rows = new Map();
let table = { runs: [] }, panels = [], names = [], sorting = null, timer = 0, isAsking = false, version = 0, drawnAt = 0, generation = 0;

// Runs

function shownRuns() {
  const newest = table.runs.slice(0, CHOSEN_AT_FIRST).map((run) => run.id);
  const ids = new Set(state.runs === "" ? newest : state.runs === "all" ? table.runs.map((run) => run.id) : state.runs.split(","));
  const runs = table.runs.filter((run) => ids.has(run.id));
  return runs.map((run, place) => ({ ...run, color: runs.length > NUM_COLORS ? (run.id === focusOf(runs) ? 0 : null) : place }));
}
const focusOf = (runs) => (runs.find((run) => run.id === state.focus) || runs[0])?.id ?? "";

function choose(ids) {
  change({ runs: ids });
  forget();
}

function drawTable() {
  const runs = shownRuns(), colors = new Map(runs.map((run) => [run.id, run.color])), focus = focusOf(runs);
  const part = byId("name-filter").value.toLowerCase();
  const listed = table.runs.filter((run) => run.name.toLowerCase().includes(part));
  if (sorting) {
    const value = (run) => (sorting.column.value ? sorting.column.value(run) : run[sorting.column.key]) ?? -Infinity;
    listed.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * sorting.sign);
  }
  for (const run of listed) if (!rows.has(run.id)) rows.set(run.id, makeRow(run.id));
  const wanted = listed.map((run) => rows.get(run.id).row), body = byId("runs").tBodies[0];
  if (wanted.length !== body.children.length || wanted.some((row, place) => row !== body.children[place])) body.replaceChildren(...wanted);
  for (const run of listed) {
    const { box, mark, name, cells } = rows.get(run.id), isShown = colors.has(run.id);
    box.checked = isShown;
    mark.className = `swatch c${isShown ? colors.get(run.id) ?? "-others" : "-none"}`;
    set(name, run.name);
    name.title = run.name;
    name.setAttribute("aria-pressed", String(run.id === focus));
    box.ariaLabel = `Show ${run.name}`;
    for (const [place, column] of COLUMNS.slice(1).entries()) set(cells[place], column.text ? column.text(run) : run[column.key]);
    cells[0].className = `state ${run.state}`;
    cells[5].className = run.alarms.length ? "bad" : "";
  }
  byId("no-runs").hidden = table.runs.length > 0;
  set(byId("root"), table.root || "");
  const colored = runs.filter((run) => run.color !== null), others = runs.length - colored.length;
  byId("legend").replaceChildren(...colored.map((run) => make("span", {}, swatch(run.color), run.name)), others ? make("span", {}, swatch(null), `${others} others`) : "");
}

const set = (element, text) => { if (element.textContent !== String(text)) element.textContent = text; };

function makeRow(id) {
  const box = make("input", { type: "checkbox" }), mark = make("i"), name = make("button", { type: "button", className: "name" });
  const cells = COLUMNS.slice(1).map((column) => make("td", { className: column.key }));
  box.addEventListener("change", () => {
    const ids = shownRuns().map((run) => run.id).filter((other) => other !== id);
    choose([...ids, ...(box.checked ? [id] : [])].join(",") || "none");
  });
  name.addEventListener("click", () => {
    change({ focus: id });
    if (!box.checked) choose([...shownRuns().map((run) => run.id), id].join(","));
    else forget();
  });
  return { box, mark, name, cells, row: make("tr", {}, make("td", {}, make("div", { className: "run" }, box, mark, name)), ...cells) };
}

function drawMessages() {
  const items = shownRuns().flatMap((run) => [
    ...run.alarms.map((text) => make("li", {}, make("span", { className: "badge critical" }, "alarm"), ` ${run.name}, update ${run.update ?? "–"}: ${text}`)),
    ...run.notes.map((text) => make("li", {}, make("span", { className: "badge ok" }, "good"), ` ${run.name}, update ${run.update ?? "–"}: ${text}`)),
  ]);
  const list = byId("messages").querySelector("ul");
  const shown = items.slice(0, 12);
  if (list.textContent !== shown.map((item) => item.textContent).join("")) list.replaceChildren(...shown);
  byId("messages").hidden = !items.length || state.view !== "charts";
}

// Charts

function wantedPanels() {
  if (state.search === "") return panels.flatMap((panel) => (panel.isSplit ? panel.curves.map((curve) => ({ ...panel, title: panel.curves.length > 1 || panel.title === "Reward functions" ? `${panel.title}: ${curve.name}` : panel.title, curves: [curve] })) : [panel]));
  let pattern = null;
  try { pattern = new RegExp(state.search, "i"); } catch { /* an unfinished expression */ }
  byId("search").setAttribute("aria-invalid", String(pattern === null));
  const found = pattern ? names.filter((name) => pattern.test(name)) : [];
  const section = `${found.length} metric${found.length === 1 ? "" : "s"}${found.length > MAX_FOUND ? `, the first ${MAX_FOUND}` : ""}`;
  return found.slice(0, MAX_FOUND).map((name) => ({ section, title: name, curves: [{ name, metric: name }] }));
}

const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) seen[entry.isIntersecting ? "add" : "delete"](entry.target);
  soon();
}, { rootMargin: "300px" });

function layOut() {
  const wanted = wantedPanels(), sections = new Map();
  for (const panel of wanted) {
    const key = JSON.stringify([panel.section, panel.title, panel.curves]);
    if (!charts.has(key)) charts.set(key, new Chart(panel, { zoom, refresh: () => { version += 1; soon(); } }));
    sections.set(panel.section, [...(sections.get(panel.section) || []), charts.get(key)]);
  }
  const key = JSON.stringify(wanted.map((panel) => [panel.section, panel.title, panel.curves]));
  if (key === layOut.key) return;
  layOut.key = key;
  observer.disconnect();
  seen.clear();
  byId("sections").replaceChildren(...[...sections].map(([title, own]) => make("section", { className: "card", ariaLabel: title }, make("h2", {}, title), make("div", { className: "charts" }, ...own.map((chart) => make("div", { className: "slot" }, chart.figure))))));
  layOut.charts = [...sections.values()].flat();
  for (const chart of layOut.charts) observer.observe(slotOf(chart));
}

const slotOf = (chart) => chart.figure.parentElement;
const visibleCharts = () => (layOut.charts || []).filter((chart) => seen.has(slotOf(chart)) || slotOf(chart).hidden);

function drawCharts() {
  drawnAt = performance.now();
  const runs = shownRuns(), focus = focusOf(runs);
  for (const chart of visibleCharts()) {
    if (chart.version === version) continue;
    chart.version = version;
    slotOf(chart).hidden = false; // a hidden chart has no width
    const isKnown = chart.curves(runs).every((curve) => store.known.has(curve.metric));
    slotOf(chart).hidden = !chart.draw(runs, focus, store) && isKnown;
  }
  for (const section of byId("sections").children) section.hidden = ![...section.querySelectorAll(".slot")].some((slot) => !slot.hidden);
}

function clearCharts() {
  [layOut.key, layOut.charts] = ["", []];
  byId("sections").replaceChildren(make("p", { className: "soft" }, table.runs.length ? "Choose a run above." : ""));
}

function zoom(from, to) {
  change({ from, to });
  forget();
}

// Other runs, another axis or zoom: all numbers are asked for again. What is drawn stays until they are here.
function forget() {
  generation += 1;
  version += 1;
  store.known.clear();
  showControls();
  drawTable();
  soon();
}

async function askSeries(metrics, since) {
  const runs = shownRuns(), asked = generation;
  const ends = state.from === "" ? {} : { from: Number(state.from), to: Number(state.to) };
  const wish = { runs: runs.map((run) => run.id), metrics, focus: focusOf(runs), hours: state.x === "hours", points: Math.min(300, innerWidth), since, grid: store.grid, ...ends };
  const buffer = await (await ask("/api/series", wish)).arrayBuffer();
  return asked === generation ? store.take(buffer, metrics) : { share: 0 };
}

async function readCharts() {
  let share = 1;
  const runs = shownRuns();
  const metrics = [...new Set(visibleCharts().flatMap((chart) => chart.curves(runs).map((curve) => curve.metric)))];
  const known = metrics.filter((metric) => store.known.has(metric)), fresh = metrics.filter((metric) => !store.known.has(metric));
  const since = Math.min(...known.map((metric) => store.known.get(metric)));
  for (const [some, from] of [[known, since], [fresh, 0]]) {
    if (!some.length && (some === known || panels.length)) continue;
    const head = await askSeries(some, from);
    share = Math.min(share, head.share);
    if (head.panels) ({ panels, names } = head);
    if (some === fresh || head.blocks?.length) version += 1;
  }
  layOut();
  if (share === 1 || fresh.length || performance.now() - drawnAt > DRAW_MS) drawCharts(); // many lines take time
  return share;
}

// Asking

function soon() {
  clearTimeout(timer);
  timer = setTimeout(tick, SOON_MS);
}

async function tick() {
  if (isAsking) return soon();
  isAsking = true;
  clearTimeout(timer);
  let wait = EVERY_MS;
  try {
    table = await (await ask("/api/runs")).json();
    drawTable();
    drawMessages();
    let share = 1;
    if (state.view === "charts" && !shownRuns().length) clearCharts();
    else if (state.view === "charts") share = await readCharts();
    else await readRollouts(table.runs);
    const isComplete = share === 1 && table.isComplete;
    set(byId("status"), share < 1 ? `reading ${Math.floor(100 * share)} %` : "live");
    document.body.dataset.complete = isComplete;
    if (!isComplete) wait = READING_MS;
    const runs = shownRuns();
    if (!table.isComplete || (state.view === "charts" && visibleCharts().some((chart) => chart.curves(runs).some((curve) => !store.known.has(curve.metric))))) wait = SOON_MS;
  } catch (error) {
    set(byId("status"), `no answer: ${error.message}`);
  }
  isAsking = false;
  if (!document.hidden) timer = setTimeout(tick, wait);
}

function showControls() {
  for (const id of ["table", "charts"]) byId(id).hidden = state.view !== "charts";
  byId("rollouts").hidden = state.view !== "rollouts";
  for (const view of ["charts", "rollouts"]) byId(`view-${view}`).setAttribute("aria-pressed", String(state.view === view));
  byId("x").value = state.x;
  byId("smooth").value = state.smooth;
  if (byId("search").value !== state.search) byId("search").value = state.search;
  byId("reset").hidden = state.from === "";
}

function start() {
  readPalette();
  readAddress();
  for (const column of COLUMNS) {
    const button = make("button", { type: "button" }, column.title), head = make("th", { scope: "col", className: column.key }, button);
    button.addEventListener("click", () => {
      const sign = sorting?.column === column ? -sorting.sign : column.key === "name" ? 1 : -1;
      sorting = { column, sign };
      for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      drawTable();
    });
    byId("runs").tHead.rows[0].append(head);
  }
  byId("name-filter").addEventListener("input", drawTable);
  byId("show-newest").addEventListener("click", () => choose(""));
  byId("show-all").addEventListener("click", () => choose("all"));
  byId("show-none").addEventListener("click", () => choose("none"));
  byId("x").addEventListener("change", () => { change({ x: byId("x").value, from: "", to: "" }); forget(); });
  byId("smooth").addEventListener("input", () => { change({ smooth: byId("smooth").value }); version += 1; drawCharts(); });
  byId("search").addEventListener("input", () => { change({ search: byId("search").value }); layOut(); soon(); });
  byId("reset").addEventListener("click", () => zoom("", ""));
  for (const view of ["charts", "rollouts"]) byId(`view-${view}`).addEventListener("click", () => { change({ view }); forget(); });
  addEventListener("popstate", () => { readAddress(); forget(); });
  addEventListener("hashchange", () => { readAddress(); forget(); });
  document.addEventListener("visibilitychange", () => document.hidden || soon());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readPalette(); for (const chart of charts.values()) chart.plot?.redraw(); });
  startRollouts(soon);
  showControls();
  tick();
}
start();
