// Charts of metrics: lines of runs over updates or hours, by uPlot. Cursor and zoom are shared by all charts.
import { make, number, state } from "./dom.js";

export const NUM_COLORS = 8; // runs above which only the one in focus has a color
const HEIGHT = 212, MAX_IN_TOOLTIP = 8, MAX_DECADES = 12;
const round = (first, last) => Array.from({ length: last - first + 1 }, (_, i) => [1, 2, 5].map((factor) => Number(`${factor}e${first + i}`))).flat();
const ROUND = round(-30, 38), WHOLE = round(0, 15); // steps of ticks
let palette = {};
export function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const names = ["--soft", "--line", "--text", "--others", ...Array.from({ length: NUM_COLORS }, (_, i) => `--series-${i}`)];
  palette = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(name).trim()]));
}
export const swatch = (color) => make("i", { className: `swatch c${color ?? "-others"}` });
const paint = (color) => palette[color === null ? "--others" : `--series-${color % NUM_COLORS}`];

// Numbers of the shown runs on one grid of buckets.
export class Store {
  clear(grid = null) {
    [this.grid, this.count, this.lines, this.known] = [grid, 0, new Map(), new Map()];
  }
  constructor() { this.clear(); }

  // Take an answer of /api/series: the length of a head, the head as JSON, numbers.
  take(buffer, metrics) {
    const size = new DataView(buffer).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
    if (head.grid && String(head.grid) !== String(this.grid)) this.clear(head.grid);
    let at = 4 + size;
    for (const [run, metric, kinds] of head.blocks) {
      const [mean, low, high] = Array.from({ length: kinds }, (_, kind) => plain(new Float32Array(buffer, at + 4 * kind * head.count, head.count)));
      this.lines.set(`${run} ${metric}`, { mean, low, high });
      at += 4 * kinds * head.count;
    }
    this.count = Math.max(this.count, head.count || 0);
    if (this.grid) for (const metric of metrics) this.known.set(metric, head.clock);
    return head;
  }

  get xs() {
    const [start, width] = this.grid;
    const middle = state.x === "hours" ? width / 2 : (width - 1) / 2;
    return Array.from({ length: this.count }, (_, i) => start + i * width + middle);
  }
}
// For uPlot a line goes on over undefined (the metric is not in these lines) and has a gap at null (it was not finite).
const plain = (floats) => Array.from(floats, (value) => (Number.isNaN(value) ? undefined : Number.isFinite(value) ? value : null));

function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    [sum, total] = [weight * sum + value, weight * total + 1];
    return sum / total;
  });
}

export class Chart {
  // panel: as the server declares it. actions: zoom(from, to), refresh().
  constructor(panel, actions) {
    this.panel = panel;
    this.actions = actions;
    this.values = make("span", { className: "values" });
    this.picker = make("select", { ariaLabel: `Curve of ${panel.title}` }, ...panel.curves.map((curve) => make("option", {}, curve.name)));
    this.picker.hidden = true;
    this.picker.addEventListener("change", actions.refresh);
    this.box = make("div", { className: "plot", tabIndex: 0, role: "img" });
    this.tooltip = make("div", { className: "tooltip", hidden: true });
    const caption = make("figcaption", {}, make("b", {}, panel.title), this.picker, this.values);
    this.figure = make("figure", { className: "chart" }, caption, this.box, make("p", { className: "note" }, panel.meaning || ""));
    this.box.append(this.tooltip);
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("blur", () => this.hover(false));
    new ResizeObserver(() => this.plot && this.plot.setSize({ width: this.box.clientWidth, height: HEIGHT })).observe(this.box);
  }

  // Curves that are drawn: of one run all, of several runs one.
  curves(runs) {
    const { curves } = this.panel;
    this.picker.hidden = runs.length < 2 || curves.length < 2;
    return this.picker.hidden ? curves : [curves[this.picker.selectedIndex]];
  }

  // Return whether there is anything to see.
  draw(runs, focus, store) {
    const curves = this.curves(runs);
    const lines = [];
    // The run in focus comes last, on top of the others.
    for (const run of [...runs].sort((a, b) => (a.id === focus) - (b.id === focus) || (b.color === null) - (a.color === null)))
      for (const [place, curve] of curves.entries()) {
        const line = store.lines.get(`${run.id} ${curve.metric}`);
        if (!line || !line.mean.some((value) => value !== undefined && (value || !this.panel.hidesZeros || runs.length > 1))) continue;
        const name = runs.length > 1 ? run.name : curve.name;
        lines.push({ ...line, run, name, metric: curve.metric, color: runs.length > 1 ? run.color : place % NUM_COLORS, isFocus: run.id === focus, isDashed: this.panel.dashed?.includes(curve.name) && curves.length > 1 });
      }
    this.lines = lines;
    if (lines.length) this.plotLines(lines, store, runs.length);
    const words = lines.slice(-MAX_IN_TOOLTIP).map((line) => `${line.name} ${number(line.mean.findLast((value) => value != null))}`);
    this.box.setAttribute("aria-label", `${this.panel.title}; last: ${words.join(", ")}. Arrow keys read values, plus and minus zoom.`);
    return lines.length > 0 || curves.length < this.panel.curves.length;
  }

  plotLines(lines, store, numRuns) {
    const weight = Number(state.smooth), data = [store.xs], series = [{}], bands = [];
    const all = lines.flatMap((line) => line.mean.filter((value) => value)).map(Math.abs);
    const isLog = this.panel.isLog && all.length > 0;
    const top = isLog ? Math.ceil(Math.log10(all.reduce((a, b) => Math.max(a, b))) + 1e-9) : 0;
    const bottom = isLog ? Math.min(top - 1, Math.max(top - MAX_DECADES, Math.floor(Math.log10(all.reduce((a, b) => Math.min(a, b)))))) : 0;
    const fitted = (values) => (isLog ? values.map((value) => (value == null ? value : Math.max(10 ** bottom, Math.abs(value)))) : values);
    const add = (values, options) => series.push({ points: { show: false }, ...options }) && data.push(fitted(values));
    for (const line of lines) {
      const stroke = () => paint(line.color);
      if (line.isFocus && line.high && store.grid[1] > 1 && !isLog) {
        add(line.high, { stroke: "transparent" });
        add(line.low, { stroke: "transparent" });
        bands.push({ series: [series.length - 2, series.length - 1], fill: () => `${paint(line.color)}2e` });
      } else if (weight && (line.isFocus || numRuns === 1)) add(line.mean, { stroke: () => `${paint(line.color)}48`, width: 1 });
      const isSparse = line.mean.filter((value) => value != null).length < 40;
      line.values = weight ? smoothed(line.mean, weight) : line.mean;
      add(line.values, {
        stroke, width: line.isFocus && numRuns > 1 ? 2.2 : line.color === null ? 0.8 : 1.6, dash: line.isDashed ? [5, 4] : undefined,
        points: { show: isSparse && line.color !== null, size: 4, stroke, fill: stroke },
      });
    }
    const key = JSON.stringify([isLog, top, bottom, state.x, ...lines.map((line) => [line.run.id, line.metric, line.color, line.isFocus, line.isDashed]), series.length, series.map((one) => Boolean(one.points?.show))]);
    this.range = state.from !== "" ? [Number(state.from), Number(state.to)] : [data[0][0], Math.max(data[0].at(-1), data[0][0] + store.grid[1])];
    if (key === this.key_ && this.plot) this.plot.setData(data);
    else this.create(key, data, series, bands, isLog && [bottom, top]);
    this.show();
  }

  create(key, data, series, bands, decades) {
    this.plot?.destroy();
    this.key_ = key;
    const axis = { stroke: () => palette["--soft"], font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", grid: { stroke: () => palette["--line"], width: 1 }, ticks: { show: false }, labelSize: 16, labelGap: 0 };
    const [low, high] = this.panel.limits || [];
    const fit = (_, min, max) => {
      if (min === null || min === undefined) return [0, 1];
      const [from, to] = [Math.min(min, low ?? min), Math.max(max, high ?? max)];
      const pad = (to - from) * 0.06 || Math.abs(to) * 0.1 || 1;
      return [from === low ? from : from - pad, to === high ? to : to + pad];
    };
    const logSplits = () => {
      const every = Math.ceil((decades[1] - decades[0]) / 5), count = Math.floor((decades[1] - decades[0]) / every) + 1;
      return Array.from({ length: count }, (_, i) => 10 ** (decades[0] + i * every));
    };
    const y = decades ? { distr: 3, range: [10 ** decades[0], 10 ** decades[1]] } : { range: fit };
    this.plot = new uPlot({
      width: this.box.clientWidth, height: HEIGHT, series, bands, legend: { show: false }, padding: [8, 18, 0, 0],
      scales: { x: { time: false, range: () => this.range }, y },
      axes: [
        { ...axis, size: 20, space: 56, label: state.x === "hours" ? "hours" : "update", ...(state.x === "hours" ? {} : { incrs: WHOLE }), values: (_, ticks) => labels(ticks) },
        { ...axis, label: this.panel.unit || undefined, size: (_, ticks) => 14 + 6.2 * Math.max(1, ...(ticks || [""]).map((tick) => tick.length)), space: 24, ...(decades ? { splits: logSplits, filter: (_, ticks) => ticks, values: (_, ticks) => ticks.map((tick) => `1e${Math.round(Math.log10(tick))}`) } : { incrs: ROUND, values: (_, ticks) => labels(ticks) }) },
      ],
      cursor: {
        sync: { key: "watch", setSeries: false }, y: false, drag: { x: true, y: false, setScale: false },
        points: { show: series.length < 12, size: 6 },
        bind: { dblclick: () => () => { this.actions.zoom("", ""); return null; } },
      },
      hooks: {
        setCursor: [() => this.show()],
        setSelect: [(plot) => {
          if (plot.select.width < 5) return;
          const ends = [plot.select.left, plot.select.left + plot.select.width].map((at) => plot.posToVal(at, "x"));
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          this.actions.zoom(...ends.map((end) => String(state.x === "hours" ? Number(end.toPrecision(5)) : Math.round(end))));
        }],
      },
    }, data, this.box);
    this.plot.over.addEventListener("mouseenter", () => this.hover(true));
    this.plot.over.addEventListener("mouseleave", () => this.hover(false));
  }

  hover(isOn) {
    this.isHovered = isOn;
    this.show();
  }

  // Show the values at the cursor, or the last ones: above the chart those of one run, in the tooltip those of all.
  show() {
    if (!this.plot) return;
    const { idx, left, top } = this.plot.cursor, data = this.plot.data;
    const value = (line) => (idx == null || left < 0 ? line.values.findLast((one) => one != null) : near(line.values, idx));
    const isSingle = new Set(this.lines.map((line) => line.run.id)).size < 2;
    const own = isSingle ? this.lines.slice(0, NUM_COLORS) : this.lines.filter((line) => line.isFocus);
    this.values.replaceChildren(...own.map((line) => make("span", {}, swatch(line.color), isSingle && this.lines.length > 1 ? `${line.name} ` : "", make("b", {}, number(value(line))))));
    this.tooltip.hidden = !this.isHovered || idx == null || left < 0;
    if (this.tooltip.hidden) return;
    const distance = (line) => Math.abs(this.plot.valToPos(value(line) ?? Infinity, "y") - top);
    const rows = this.lines.filter((line) => value(line) != null).sort((a, b) => distance(a) - distance(b)).slice(0, MAX_IN_TOOLTIP).sort((a, b) => value(b) - value(a));
    const more = this.lines.length - rows.length;
    this.tooltip.replaceChildren(
      make("div", { className: "soft" }, state.x === "hours" ? `${number(data[0][idx])} hours` : `update ${Math.round(data[0][idx]).toLocaleString("en-US")}`),
      ...rows.map((line) => make("div", { className: "row" }, swatch(line.color), make("span", { className: "name" }, line.name), make("b", {}, number(value(line))))),
      more > 0 ? make("div", { className: "soft" }, `${more} more`) : "",
    );
    const width = this.box.clientWidth, at = left + this.plot.bbox.left / devicePixelRatio;
    this.tooltip.style.left = `${Math.max(0, at + 14 + this.tooltip.offsetWidth > width ? at - 14 - this.tooltip.offsetWidth : at + 14)}px`;
    this.tooltip.style.top = "4px";
  }

  key(event) {
    if (!this.plot) return;
    const xs = this.plot.data[0], step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], factor = { "+": 0.5, "-": 2 }[event.key];
    if (event.key === "Escape") return this.hover(false);
    if (!step && !factor) return;
    event.preventDefault();
    const idx = Math.max(0, Math.min(xs.length - 1, (this.plot.cursor.idx ?? xs.length - 1) + (step || 0)));
    if (step) {
      this.isHovered = true;
      this.plot.setCursor({ left: this.plot.valToPos(xs[idx], "x"), top: HEIGHT / 3 });
    } else {
      const half = ((this.range[1] - this.range[0]) / 2) * factor, whole = state.x === "hours" ? Number : Math.round;
      this.actions.zoom(String(whole(Math.max(xs[0], xs[idx] - half))), String(whole(xs[idx] + half)));
    }
  }
}

// The value in a bucket, or the last one before it: metrics that not every line has are drawn as lines between theirs.
function near(values, idx) {
  while (idx > 0 && values[idx] === undefined) idx -= 1;
  return values[idx];
}

function labels(ticks) {
  const step = ticks.length > 1 ? ticks[1] - ticks[0] : 1, largest = Math.max(...ticks.map(Math.abs));
  if (largest >= 1e6 || (largest && largest < 1e-3)) return ticks.map((tick) => (tick ? tick.toExponential(Math.max(0, Math.floor(Math.log10(Math.abs(tick) * 1.0001)) - Math.floor(Math.log10(step) + 1e-9))).replace("e+", "e") : "0"));
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return ticks.map((tick) => (Math.abs(tick) >= 1e4 ? tick.toLocaleString("en-US") : tick.toFixed(decimals)));
}
