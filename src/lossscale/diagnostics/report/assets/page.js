// SPDX-License-Identifier: Apache-2.0
// The script of a report page. It reads the numbers that are in the page, draws them, and
// fetches nothing. Names of tensors and runs reach the document as text only.
(() => {
  "use strict";

  const DATA = JSON.parse(document.getElementById("report-data").textContent);
  const RUNS = DATA.runs;
  // The scales of other policies, in a backtest: lines of the scale chart alone.
  const OTHERS = DATA.policies ?? [];
  const SCALES = OTHERS.length ? [{ ...RUNS[0], title: "as recorded" }, ...OTHERS] : RUNS;
  const CAUSES = {
    inf: { shape: "triangle", label: "infinite gradient" },
    nan: { shape: "cross", label: "NaN gradient" },
    headroom: { shape: "square", label: "gradient too large to square" },
    loss: { shape: "diamond", label: "loss not finite" },
    "not stepped": { shape: "circle", label: "step not called" },
  };
  const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [1, 4], [14, 4]];
  const $ = (selector, root = document) => root.querySelector(selector);

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function svg(tag, attributes = {}, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const runColour = (index) => colour(`--run-${index % 6}`);

  // ---- Numbers as text ------------------------------------------------------------------

  const SPACE = "\u00a0";
  const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  const power = (exponent) => "2" + [...String(exponent)].map((c) => SUPERSCRIPTS[c]).join("");
  const whole = (value) => Math.round(value).toLocaleString("en-US");

  function number(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (Number.isInteger(value) && Math.abs(value) < 1e8) return whole(value);
    // As `number` in report/wording.py has it.
    const size = Math.abs(value), exponent = Math.log2(size);
    if ((size >= 1e8 || size < 1e-3) && Number.isInteger(exponent) && value > 0) return power(exponent);
    if (size >= 1e3 && size < 1e8) return whole(value);
    if (size >= 1e4 || size < 1e-4) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  }

  function scaleText(value) {
    if (value === null || Number.isNaN(value)) return "–";
    const exponent = Math.log2(value);
    if (!Number.isInteger(exponent)) return number(value);
    return Math.abs(exponent) > 26 ? power(exponent) : `${power(exponent)} = ${number(value)}`;
  }

  function percent(share) {
    if (share === 0) return `0${SPACE}%`;
    if (share < 1e-4) return `< 0.01${SPACE}%`;
    return `${(100 * share).toFixed(share < 0.01 ? 2 : 1)}${SPACE}%`;
  }

  // Short enough for an axis.
  const tick = (value) => (Math.abs(value) >= 1e5 ? value.toExponential().replace("e+", "e") : number(value));
  const bits = (value) => (value === null || Number.isNaN(value) ? "–" : `${value.toFixed(1)} bits`);
  const between = (low, high, show) => (Object.is(low, high) || high === null ? show(low) : `${show(low)} to ${show(high)}`);

  // ---- Numbers in the page --------------------------------------------------------------

  async function inflate(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  // Rows of numbers are stored as planes: all first bytes, all second bytes, and so on.
  function rowReader(bytes) {
    let at = 0;
    const row = (count, size) => {
      const target = new Uint8Array(count * size);
      for (let plane = 0; plane < size; plane++) {
        for (let i = 0; i < count; i++) target[i * size + plane] = bytes[at++];
      }
      return target.buffer;
    };
    return {
      floats: (count) => new Float32Array(row(count, 4)),
      words: (count) => new Uint32Array(row(count, 4)),
      shorts: (count) => new Int16Array(row(count, 2)),
    };
  }

  // Consecutive buckets of a run: steps, extremes of each series, skips by cause, and how
  // many losses were not finite.
  function chunkArrays(chunk) {
    chunk.arrays ??= inflate(chunk.data).then((bytes) => {
      const read = rowReader(bytes);
      const first = new Float64Array(chunk.count);
      const last = new Float64Array(chunk.count);
      let step = chunk.from;
      read.words(chunk.count).forEach((gap, i) => { first[i] = step += gap; });
      const widths = chunk.exact ? null : read.words(chunk.count);
      first.forEach((value, i) => { last[i] = value + (widths ? widths[i] : 0); });
      const low = {}, high = {}, causes = {};
      for (const name of chunk.series) {
        low[name] = read.floats(chunk.count);
        high[name] = chunk.exact ? low[name] : read.floats(chunk.count);
      }
      for (const cause of chunk.causes) causes[cause] = read.words(chunk.count);
      const broken = chunk.broken ? read.words(chunk.count) : null;
      return { first, last, low, high, causes, broken };
    });
    return chunk.arrays;
  }

  const stepsPerBucket = (chunk) => (chunk.to - chunk.from + 1) / chunk.count;

  // The chunks that show a range, the finest last: the overview, and finer ones as soon as
  // they show more than it does.
  function chunksFor(run, from, to, most) {
    const [overview, ...others] = run.chunks;
    if (!overview) return [];
    const shown = (to - from + 1) / stepsPerBucket(overview);
    if (shown >= most || shown >= overview.count * 0.95) return [overview];
    const finer = others.filter((chunk) => chunk.from <= to && chunk.to >= from);
    finer.sort((a, b) => stepsPerBucket(b) - stepsPerBucket(a));
    return [overview, ...finer];
  }

  // A range of a run in columns of equal width, each with the extremes of the buckets that
  // begin in it. A bucket may go on in the columns to its right, and over the ends of the
  // range: `first` and `last` are the steps that the numbers of a column belong to, and
  // `source` is the column that has those of another.
  async function viewOf(run, { from, to, start, width }) {
    const count = Math.ceil((to - start + 1) / width);
    const first = new Float64Array(count).fill(NaN), last = new Float64Array(count).fill(NaN);
    const low = {}, high = {}, causes = {}, broken = {};
    const rows = (target, name, fill) => (target[name] ??= new Float64Array(count).fill(fill));
    const chunks = chunksFor(run, from, to, (to - from + 1) / width);
    for (const [place, chunk] of chunks.entries()) {
      const finer = chunks.slice(place + 1);
      const arrays = await chunkArrays(chunk);
      for (let i = 0; i < chunk.count; i++) {
        const begin = arrays.first[i], end = arrays.last[i];
        if (end < from || begin > to) continue;
        // A finer chunk has all of a bucket or nothing of it: see `levels.py`.
        if (finer.some((other) => other.from <= begin && other.to >= end)) continue;
        const column = Math.floor((Math.max(begin, from) - start) / width);
        if (!(first[column] <= begin)) first[column] = begin;
        if (!(last[column] >= end)) last[column] = end;
        for (const name of chunk.series) {
          const small = arrays.low[name][i], large = arrays.high[name][i];
          if (Number.isNaN(large)) continue;
          const lows = rows(low, name, NaN), highs = rows(high, name, NaN);
          if (!(lows[column] <= small)) lows[column] = small;
          if (!(highs[column] >= large)) highs[column] = large;
        }
        for (const cause of chunk.causes) rows(causes, cause, 0)[column] += arrays.causes[cause][i];
        if (arrays.broken) rows(broken, "loss", 0)[column] += arrays.broken[i];
      }
    }
    const source = new Int32Array(count);
    for (let column = 1; column < count; column++) {
      const before = source[column - 1];
      const goesOn = Number.isNaN(first[column]) && last[before] >= start + column * width;
      source[column] = goesOn ? before : column;
    }
    return { from, to, start, width, count, first, last, source, low, high, causes, broken };
  }

  // The steps that the numbers of a column belong to.
  function stepsAt(view, column) {
    const source = view.source[column];
    if (!Number.isNaN(view.first[source])) return [view.first[source], view.last[source]];
    const start = view.start + column * view.width;
    return [Math.max(start, view.from), Math.min(start + view.width - 1, view.to)];
  }

  // Where a mark for something in a column is: in the middle of the steps it belongs to.
  function middleOf(view, column) {
    const [first, last] = stepsAt(view, column);
    return (Math.max(first, view.from) + Math.min(last, view.to)) / 2;
  }

  const sum = (counts) => counts.reduce((a, b) => a + b, 0);
  const RECORDED = RUNS.filter((run) => run.first !== null);
  const firstStep = RECORDED.length ? Math.min(...RECORDED.map((run) => run.first)) : 0;
  const lastStep = RECORDED.length ? Math.max(...RECORDED.map((run) => run.last)) : 0;

  // ---- The range of steps that is shown -------------------------------------------------

  const range = { from: firstStep, to: lastStep };
  const hidden = new Set();
  const charts = [];
  let cells = 500;
  let drawing = 0;

  async function showRange(from, to) {
    const least = Math.min(8, lastStep - firstStep + 1);
    let size = Math.round(Math.max(least, Math.min(to - from + 1, lastStep - firstStep + 1)));
    range.from = Math.round(Math.max(firstStep, Math.min(from, lastStep - size + 1)));
    range.to = range.from + size - 1;
    $("#from").value = range.from;
    $("#to").value = range.to;
    await drawCharts();
  }

  function describeRange(views) {
    const widths = views.flatMap((view) => Array.from(view.first, (first, i) => view.last[i] - first + 1))
      .filter((value) => !Number.isNaN(value));
    const widest = Math.max(1, ...widths);
    // The last one of each run may be narrower.
    const most = widths.filter((value) => value < widest).length > views.length ? "up to " : "";
    const points = widest === 1 ? "every step" : `${most}${whole(widest)} steps a point, with their extremes`;
    return `Steps ${whole(range.from)} to ${whole(range.to)} of ${whole(lastStep)}, ${points}` +
      (widest > 2 * views[0].width ? "; this page has no finer ones here" : "");
  }

  // Where the columns at the ends of a range have steps beyond it: which are counted.
  function beyondRange(views) {
    const known = (values) => values.filter((value) => !Number.isNaN(value));
    const first = Math.min(range.from, ...views.flatMap((view) => [...known(view.first)]));
    const last = Math.max(range.to, ...views.flatMap((view) => [...known(view.last)]));
    return first < range.from || last > range.to ? ` (in steps ${whole(first)} to ${whole(last)})` : "";
  }

  // Columns that stay where they are while the range moves.
  function columnsOf(width) {
    return { ...range, start: range.from - (range.from - firstStep) % width, width };
  }

  async function drawCharts() {
    const turn = ++drawing;
    const columns = columnsOf(Math.ceil((range.to - range.from + 1) / cells));
    const views = await Promise.all(SCALES.map((run) => viewOf(run, columns)));
    if (turn !== drawing) return;
    for (const chart of charts) chart.draw(views);
    $("#range-text").textContent = describeRange(views);
    document.documentElement.dataset.shown = `${range.from}-${range.to}`;
  }

  function zoom(factor, at = (range.from + range.to) / 2) {
    const size = range.to - range.from + 1;
    const share = (at - range.from) / size;
    const next = size * factor;
    return showRange(at - share * next, at + (1 - share) * next - 1);
  }

  function pan(share) {
    const shift = Math.max(1, Math.round((range.to - range.from + 1) * Math.abs(share))) * Math.sign(share);
    return showRange(range.from + shift, range.to + shift);
  }

  // ---- Line charts ----------------------------------------------------------------------

  const KINDS = {
    scale: {
      series: "scale", map: Math.log2, stepped: true, height: 220,
      tick: (value) => (Number.isInteger(value) ? power(value) : ""),
      increments: [1, 2, 4, 8, 16, 32, 64],
      show: scaleText,
    },
    loss: { series: "loss", log: "auto", height: 220, tick, show: number },
    norm: { series: "norm", log: "auto", height: 180, tick, show: number, second: "clip" },
    headroom: { series: "headroom", height: 180, tick: (v) => `${v}`, show: bits, edge: 0 },
  };

  function drawShape(context, shape, x, y, size) {
    context.beginPath();
    if (shape === "triangle") {
      context.moveTo(x - size, y - size); context.lineTo(x + size, y - size);
      context.lineTo(x, y + size * 0.8); context.closePath();
    } else if (shape === "cross") {
      context.moveTo(x - size, y - size); context.lineTo(x + size, y + size);
      context.moveTo(x + size, y - size); context.lineTo(x - size, y + size);
    } else if (shape === "square") {
      context.rect(x - size * 0.8, y - size * 0.8, size * 1.6, size * 1.6);
    } else if (shape === "diamond") {
      context.moveTo(x, y - size * 1.1); context.lineTo(x + size * 1.1, y);
      context.lineTo(x, y + size * 1.1); context.lineTo(x - size * 1.1, y); context.closePath();
    } else {
      context.arc(x, y, size * 0.9, 0, 2 * Math.PI);
    }
    if (shape === "cross" || shape === "circle") context.stroke();
    else context.fill();
  }

  const SHAPE_PATHS = {
    triangle: "M1 2h10l-5 8z", cross: "M2 2l8 8M10 2l-8 8", square: "M2 2h8v8h-8z",
    diamond: "M6 1l5 5-5 5-5-5z", circle: "M6 2a4 4 0 1 0 .01 0z",
  };

  function shapeKey(cause) {
    const { shape } = CAUSES[cause];
    const open = shape === "cross" || shape === "circle";
    return svg("svg", { class: open ? "key open" : "key", viewBox: "0 0 12 12", "aria-hidden": "true" },
      svg("path", { d: SHAPE_PATHS[shape] }));
  }

  const alarmKey = () => svg("svg", { class: "key open", viewBox: "0 0 12 12", "aria-hidden": "true" },
    svg("path", { d: "M6 0v12", "stroke-dasharray": "3 2" }));

  // The points of a line that has none next to them.
  function lonelyPoints(plot, series) {
    const values = plot.data[series];
    const known = [...values.keys()].filter((i) => values[i] !== undefined);
    return known.filter((i, k) => values[i] !== null && values[known[k - 1]] == null && values[known[k + 1]] == null);
  }

  // What is shown of values of which some were not finite.
  function withBroken(text, low, broken) {
    if (!broken) return text;
    return Number.isNaN(low) ? "not finite" : `${text}, ${whole(broken)} not finite`;
  }

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.kind = KINDS[figure.dataset.chart];
      this.lines = this.kind.series === "scale" ? SCALES : RUNS;
      this.plotArea = $(".plot", figure);
      this.readout = $(".readout", figure);
      this.details = $("details", figure);
      this.views = [];
      this.cursor = null;
      this.plotArea.addEventListener("keydown", (event) => this.onKey(event));
      this.plotArea.addEventListener("blur", () => this.plot?.setCursor({ left: -10, top: -10 }));
      this.details.addEventListener("toggle", () => this.fillTable());
    }

    isDrawn(index) {
      return !hidden.has(index) && !(this.kind.series === "headroom" && this.lines[index].wide);
    }

    draw(views) {
      views = this.views = views.slice(0, this.lines.length);
      const { start, width, count } = views[0];
      const steps = Array.from({ length: count }, (_, i) => start + i * width);
      // A line goes on over what was not measured (undefined), and ends where a value was
      // measured and is not finite (null).
      const mapped = (source, values, broken) => Array.from(source, (i) => {
        const value = values ? values[i] : NaN;
        if (!Number.isNaN(value)) return this.kind.map ? this.kind.map(value) : value;
        return values && broken?.[i] > 0 ? null : undefined;
      });
      const data = [steps];
      views.forEach((view, index) => {
        const drawn = this.isDrawn(index), broken = view.broken[this.kind.series];
        for (const end of [view.low, view.high]) data.push(mapped(view.source, drawn && end[this.kind.series], broken));
      });
      if (this.kind.second) {
        views.forEach((view, index) => data.push(mapped(view.source, this.isDrawn(index) && view.low[this.kind.second])));
      }
      const seen = data.slice(1, 1 + 2 * views.length).flat().filter((v) => v != null);
      const log = this.kind.log === "auto" && seen.length > 0 && Math.min(...seen) > 0 &&
        Math.max(...seen) / Math.min(...seen) > 20;
      this.clips = Boolean(this.kind.second) && views.some((view, index) =>
        this.isDrawn(index) && view.low.clip?.some((value) => value < 1));
      this.plotArea.closest("figure").classList.toggle("clips", this.clips);
      const shape = `${log} ${this.clips} ${this.plotArea.clientWidth}`;
      if (this.plot && this.shape === shape) {
        this.plot.setData(data);
      } else {
        this.shape = shape;
        this.build(data, log);
      }
      this.figure.classList.toggle("empty", seen.length === 0);
      this.say(null);
      this.countSkips();
      this.fillTable();
    }

    build(data, log) {
      this.plot?.destroy();
      const kind = this.kind;
      const ink = colour("--muted"), line = colour("--line");
      const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
      const series = [{}], bands = [];
      this.lines.forEach((_, index) => {
        const stroke = runColour(index);
        const one = {
          scale: "y", stroke, width: 1.5, dash: DASHES[index % DASHES.length],
          points: { show: true, size: 4, width: 0, fill: stroke, filter: lonelyPoints }, paths: kind.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
        };
        series.push(one, { ...one });
        bands.push({ series: [2 * index + 2, 2 * index + 1], fill: `${stroke}4d` });
      });
      if (kind.second) {
        this.lines.forEach((_, index) => series.push({
          scale: "clip", stroke: runColour(index), width: 1, dash: [1, 3], points: { show: false },
          show: this.clips,
        }));
      }
      const axes = [
        { ...axis, values: (_, ticks) => ticks.map((v) => (Number.isInteger(v) ? whole(v) : "")), size: 32, space: 80 },
        { ...axis, scale: "y", size: 56, ...(log && { grid: { ...axis.grid, filter: powersOfTen } }), values: (_, ticks) => ticks.map((v) => (v === null ? "" : kind.tick(v))), ...(kind.increments && { incrs: kind.increments }) },
      ];
      if (this.clips) {
        axes.push({ ...axis, scale: "clip", side: 1, size: 40, grid: { show: false }, values: (_, ticks) => ticks.map((v) => `${v}`) });
      }
      this.plotArea.replaceChildren();
      this.plot = new uPlot({
        width: this.plotArea.clientWidth,
        height: kind.height,
        padding: [10, this.clips ? 4 : 32, 0, 0],
        legend: { show: false },
        cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { show: false }, sync: { key: "steps", setSeries: false } },
        scales: {
          x: { time: false, range: () => [range.from, Math.max(range.from + 1, range.to)] },
          y: log ? { distr: 3 } : { range: (_, low, high) => padded(low, high, kind) },
          clip: { range: [0, 1.05] },
        },
        axes, series, bands,
        hooks: {
          setSelect: [(plot) => this.onSelect(plot)],
          setCursor: [(plot) => this.onCursor(plot)],
          draw: [(plot) => this.drawMarks(plot)],
        },
      }, data, this.plotArea);
      this.plot.root.setAttribute("aria-hidden", "true");
    }

    drawMarks(plot) {
      const { ctx: context } = plot, { left, top, width, height } = plot.bbox;
      const ratio = devicePixelRatio || 1;
      context.save();
      if (this.kind.edge !== undefined) {
        const y = plot.valToPos(this.kind.edge, "y", true);
        if (y >= top && y <= top + height) {
          context.strokeStyle = context.fillStyle = colour("--alarm");
          context.lineWidth = ratio;
          context.setLineDash([]);
          context.beginPath(); context.moveTo(left, y); context.lineTo(left + width, y); context.stroke();
          context.font = `${12 * ratio}px system-ui, sans-serif`;
          context.textAlign = "left";
          context.textBaseline = "alphabetic";
          context.fillText("overflow", left + 6 * ratio, y - 5 * ratio);
        }
      }
      this.drawAlarms(plot);
      if (this.kind.series === "loss") {
        this.views.forEach((view, index) => {
          if (!this.isDrawn(index)) return;
          context.strokeStyle = RUNS.length === 1 ? colour("--alarm") : runColour(index);
          context.lineWidth = 1.8 * ratio;
          context.setLineDash([]);
          view.broken.loss?.forEach((count, i) => {
            if (!count) return;
            const x = plot.valToPos(middleOf(view, i), "x", true);
            drawShape(context, "cross", x, top + 5 * ratio, 3.4 * ratio);
          });
        });
      }
      if (this.kind.series === "scale") {
        this.views.forEach((view, index) => {
          if (!this.isDrawn(index)) return;
          context.fillStyle = context.strokeStyle = RUNS.length === 1 ? colour("--alarm") : runColour(index);
          context.lineWidth = 1.8 * ratio;
          context.setLineDash([]);
          for (const [cause, counts] of Object.entries(view.causes)) {
            counts.forEach((count, i) => {
              // A step is skipped at the scale from which it is lowered.
              const scale = view.high.scale?.[i];
              if (!count || !(scale > 0)) return;
              const x = plot.valToPos(middleOf(view, i), "x", true);
              const y = plot.valToPos(Math.log2(scale), "y", true);
              drawShape(context, CAUSES[cause].shape, x, y, 4.2 * ratio);
            });
          }
        });
      }
      context.restore();
    }

    // The alarms in view, as pairs of a run's index and a step with a kind.
    alarmsInView() {
      return this.lines.flatMap((run, index) => (this.isDrawn(index) ? run.alarms ?? [] : [])
        .filter(([step]) => step >= range.from && step <= range.to)
        .map((alarm) => [index, alarm]));
    }

    drawAlarms(plot) {
      const { ctx: context } = plot, { left, top, width, height } = plot.bbox;
      const ratio = devicePixelRatio || 1;
      let free = -Infinity;
      context.lineWidth = ratio;
      context.font = `${12 * ratio}px system-ui, sans-serif`;
      context.textAlign = "left";
      context.textBaseline = "top";
      const alarms = this.alarmsInView().sort(([, [one]], [, [other]]) => one - other);
      for (const [index, [step, kind]] of alarms) {
        const x = plot.valToPos(step, "x", true);
        context.strokeStyle = context.fillStyle = RUNS.length === 1 ? colour("--alarm") : runColour(index);
        context.setLineDash([3 * ratio, 3 * ratio]);
        context.beginPath(); context.moveTo(x, top); context.lineTo(x, top + height); context.stroke();
        const text = context.measureText(kind).width + 8 * ratio;
        if (this.kind.series !== "scale" || x < free || x + text > left + width) continue;
        context.fillText(kind, x + 4 * ratio, top + 2 * ratio);
        free = x + text;
      }
      context.setLineDash([]);
    }

    onSelect(plot) {
      const { left, width } = plot.select;
      if (width < 4) return;
      const from = plot.posToVal(left, "x"), to = plot.posToVal(left + width, "x");
      plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      showRange(from, to);
    }

    onCursor(plot) {
      this.cursor = plot.cursor.idx ?? null;
      this.say(plot.cursor.left < 0 ? null : this.cursor);
    }

    onKey(event) {
      const count = this.views[0]?.count ?? 0;
      const actions = {
        ArrowLeft: () => (event.shiftKey ? pan(-0.25) : this.moveCursor(-1, count)),
        ArrowRight: () => (event.shiftKey ? pan(0.25) : this.moveCursor(1, count)),
        Home: () => this.moveCursor(-Infinity, count),
        End: () => this.moveCursor(Infinity, count),
        "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => showRange(firstStep, lastStep),
      };
      if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      actions[event.key]();
    }

    moveCursor(by, count) {
      const isSame = (column) => this.views.every((view) => view.source[column] === view.source[this.cursor]);
      let next = Math.max(0, Math.min(count - 1, (this.cursor ?? -1) + by));
      while (this.cursor !== null && next > 0 && next < count - 1 && isSame(next)) next += by;
      const left = Math.max(0, this.plot.valToPos(this.plot.data[0][next], "x"));
      this.plot.setCursor({ left, top: 10 });
      this.cursor = next;
      this.say(next, true);
    }

    // What is at a cell, in words; without a cell, what is in view.
    say(cell, aloud = false) {
      this.readout.setAttribute("aria-live", aloud ? "polite" : "off");
      if (cell === null || !this.views.length) {
        this.readout.replaceChildren(this.defaultReadout());
        return;
      }
      const drawn = this.views.filter((_, index) => this.isDrawn(index));
      const [start, end] = stepsAt(drawn[0] ?? this.views[0], cell);
      const parts = [element("span", { class: "step" }, between(start, end, (v) => `step ${whole(v)}`).replace("to step", "to"))];
      this.views.forEach((view, index) => {
        if (!this.isDrawn(index)) return;
        const found = this.valuesAt(view, cell, [start, end]);
        let text = found.text + found.steps;
        if (this.kind.second && this.clips) text += `, clip ${found.second}`;
        if (found.skips.length) text += `, skipped: ${found.skips.map(([cause, n]) => (n > 1 ? `${n} × ${cause}` : cause)).join(", ")}`;
        const [first, last] = stepsAt(view, cell);
        const alarms = (this.lines[index].alarms ?? []).filter(([step]) => step >= first && step <= last);
        if (alarms.length) text += `, alarm: ${alarms.map(([, kind]) => kind).join(", ")}`;
        const label = this.lines.length > 1 ? `${this.lines[index].title}: ` : "";
        parts.push(element("span", { class: `value run-${index % 6}` }, label + text));
      });
      this.readout.replaceChildren(...parts);
    }

    // What a run has at a column, as text; and its steps, where they are not those that
    // are named already.
    valuesAt(view, column, named) {
      const at = view.source[column], steps = stepsAt(view, column);
      const low = view.low[this.kind.series]?.[at] ?? NaN, high = view.high[this.kind.series]?.[at] ?? NaN;
      const differs = !Number.isNaN(view.first[at]) && steps.some((step, i) => step !== named[i]);
      return {
        text: withBroken(between(low, high, this.kind.show), low, view.broken[this.kind.series]?.[at] ?? 0),
        steps: differs ? ` (${between(...steps, (v) => `step ${whole(v)}`).replace("to step", "to")})` : "",
        skips: Object.entries(view.causes).map(([cause, counts]) => [cause, counts[at]]).filter(([, count]) => count > 0),
        second: number(view.low[this.kind.second]?.[at] ?? NaN),
      };
    }

    defaultReadout() {
      const hint = this.kind.series === "headroom" && RUNS.some((run) => run.wide) && RUNS.some((run) => !run.wide)
        ? `Not drawn: ${RUNS.filter((run) => run.wide).map((run) => `${run.title} (${run.dtype})`).join(", ")}, whose format has far more headroom.`
        : "";
      return element("span", { class: "hint" }, hint);
    }

    beyond() {
      return beyondRange(this.views.filter((_, index) => this.isDrawn(index)));
    }

    countBroken(key) {
      let total = 0;
      this.views.forEach((view, index) => {
        if (this.isDrawn(index)) total += sum(view.broken.loss ?? []);
      });
      const steps = total === 1 ? "1 step" : `${whole(total)} steps`;
      key.replaceChildren(...(total ? [element("li", {}, shapeKey("nan"), ` ${steps} with a loss that was not finite${this.beyond()}`)] : []));
    }

    countSkips() {
      const key = $(".causes", this.figure);
      if (!key) return;
      if (this.kind.series === "loss") {
        this.countBroken(key);
        return;
      }
      const totals = {};
      this.views.forEach((view, index) => {
        if (!this.isDrawn(index)) return;
        for (const [cause, counts] of Object.entries(view.causes)) {
          totals[cause] = (totals[cause] ?? 0) + sum(counts);
        }
      });
      const entries = Object.entries(totals).filter(([, total]) => total > 0);
      key.replaceChildren(...entries.map(([cause, total]) =>
        element("li", {}, shapeKey(cause), ` ${whole(total)} skipped: ${CAUSES[cause].label}${this.beyond()}`)));
      if (!entries.length) key.append(element("li", {}, "No step in view was skipped."));
      const alarms = this.alarmsInView(), most = 4;
      for (const [index, [step, kind]] of alarms.slice(0, most)) {
        const whose = this.lines.length > 1 ? ` of ${this.lines[index].title}` : "";
        key.append(element("li", {}, alarmKey(), ` alarm${whose}: ${kind} at step ${whole(step)}`));
      }
      if (alarms.length > most) key.append(element("li", {}, alarmKey(), ` ${whole(alarms.length - most)} more alarms`));
    }

    async fillTable() {
      if (!this.details.open) return;
      // Buckets are powers of two wide: a row is whole ones, in every run.
      const size = Math.ceil((range.to - range.from + 1) / 40);
      const columns = columnsOf(2 ** Math.ceil(Math.log2(size)));
      const views = await Promise.all(this.lines.map((run) => viewOf(run, columns)));
      const drawn = this.lines.map((_, index) => index).filter((index) => this.isDrawn(index));
      const head = element("tr", {}, element("th", { scope: "col" }, "steps"));
      for (const index of drawn) {
        head.append(element("th", { scope: "col" }, this.lines.length > 1 ? this.lines[index].title : this.kind.series));
        if (this.kind.series === "scale" && index < RUNS.length) head.append(element("th", { scope: "col" }, "skipped"));
        if (this.kind.second) head.append(element("th", { scope: "col" }, "clip, lowest"));
      }
      const body = element("tbody");
      for (let column = 0; column < views[0].count; column++) {
        const begun = drawn.map((index) => views[index]).filter((view) => !Number.isNaN(view.first[column]));
        if (!begun.length) continue;
        const steps = stepsAt(begun[0], column);
        const row = element("tr", {}, element("th", { scope: "row" }, between(...steps, whole)));
        for (const index of drawn) {
          const found = this.valuesAt(views[index], column, steps);
          row.append(element("td", {}, found.text + found.steps));
          if (this.kind.series === "scale" && index < RUNS.length) {
            row.append(element("td", {}, (found.skips.map(([cause, count]) => `${count} ${cause}`).join(", ") || "0") + found.steps));
          }
          if (this.kind.second) row.append(element("td", {}, found.second));
        }
        body.append(row);
      }
      $(".table", this.details).replaceChildren(element("table", {}, element("thead", {}, head), body));
    }
  }

  const isPowerOfTen = (value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9;
  const powersOfTen = (_, ticks) => ticks.map((value) => (isPowerOfTen(value) ? value : null));

  function padded(low, high, kind) {
    if (low === null || high === null) return [0, 1];
    const least = kind.series === "scale" ? 2 : Math.max(1e-9, Math.abs(high) * 0.02);
    const space = Math.max(least, (high - low) * 0.12) / (kind.series === "scale" ? 2 : 1);
    const bottom = kind.edge !== undefined ? Math.min(low, kind.edge + 0.0) : low;
    return [bottom - space, high + space];
  }

  // ---- Heat maps ------------------------------------------------------------------------

  const MISSING = -32768;
  const ROW = 16;

  function mix(from, to, share) {
    const part = (text) => text.match(/\w\w/g).map((pair) => parseInt(pair, 16));
    const [a, b] = [part(from), part(to)];
    return `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * share)).join(",")})`;
  }

  const MAPS = {
    // The share of the colour: 1 where a tensor is at its end of the range.
    headroom: { heat: (value) => 1 - Math.min(1, Math.max(0, value / 16)), show: (v) => (v < 0 ? "not finite" : `${v.toFixed(1)} bits`), over: (v) => v <= 0 },
    lost: { heat: (value) => Math.sqrt(Math.min(1, Math.max(0, value / 100))), show: (v) => percent(v / 100), over: (v) => v >= 99.995 },
  };

  class HeatMap {
    constructor(figure) {
      this.figure = figure;
      this.name = figure.dataset.map;
      this.map = MAPS[this.name];
      this.canvas = $("canvas", figure);
      this.labels = $(".labels", figure);
      this.readout = $(".readout", figure);
      this.steps = $(".steps", figure);
      this.details = $("details", figure);
      this.cell = null;
      this.canvas.addEventListener("pointermove", (event) => {
        const box = this.canvas.getBoundingClientRect();
        this.point(Math.floor((event.clientX - box.left) / box.width * this.columns), Math.floor((event.clientY - box.top) / ROW));
      });
      this.canvas.addEventListener("pointerleave", () => this.point(null, null));
      this.canvas.addEventListener("keydown", (event) => this.onKey(event));
      this.canvas.addEventListener("blur", () => this.point(null, null));
      this.details.addEventListener("toggle", () => this.fillTable());
    }

    async show(run) {
      const heat = run.heat;
      this.figure.classList.toggle("empty", !heat);
      if (!heat) return;
      heat.arrays ??= inflate(heat.data).then((bytes) => {
        const read = rowReader(bytes), size = heat.names.length * heat.first.length;
        return { headroom: read.shorts(size), lost: read.shorts(size) };
      });
      this.values = (await heat.arrays)[this.name];
      this.heat = heat;
      this.columns = heat.first.length;
      this.labels.replaceChildren(...heat.names.map((name) => element("li", { title: name }, name)));
      const note = $(".note", this.figure);
      note.textContent = heat.hidden > 0 ? `${whole(heat.hidden)} tensors that are farther from the ends of the range are not shown.` : "";
      this.draw();
      this.drawSteps();
      this.fillTable();
    }

    value(column, row) {
      const stored = this.values[row * this.columns + column];
      return stored === MISSING ? null : stored / 100;
    }

    redraw() {
      this.draw();
      if (this.heat) this.drawSteps();
    }

    draw() {
      if (!this.heat) return;
      const rows = this.heat.names.length, ratio = devicePixelRatio || 1;
      const width = this.canvas.clientWidth, height = rows * ROW;
      this.canvas.style.height = `${height}px`;
      this.canvas.width = width * ratio;
      this.canvas.height = height * ratio;
      const context = this.canvas.getContext("2d");
      context.scale(ratio, ratio);
      const cold = colour(`--${this.name}-cold`), hot = colour(`--${this.name}-hot`);
      context.lineWidth = 1;
      for (let row = 0; row < rows; row++) {
        for (let column = 0; column < this.columns; column++) {
          const value = this.value(column, row);
          if (value === null) continue;
          const left = Math.floor(column * width / this.columns), right = Math.floor((column + 1) * width / this.columns);
          context.fillStyle = mix(cold, hot, this.map.heat(value));
          context.fillRect(left, row * ROW, Math.max(1, right - left), ROW - 1);
          if (this.map.over(value)) {
            context.strokeStyle = colour("--background");
            // Lines over the whole cell, which go on in the next one.
            const bottom = row * ROW + ROW - 1;
            context.save();
            context.beginPath();
            context.rect(left, row * ROW, Math.max(1, right - left), ROW - 1);
            context.clip();
            context.beginPath();
            for (let x = left - ROW - left % 5; x < right; x += 5) {
              context.moveTo(x, bottom); context.lineTo(x + ROW - 1, row * ROW);
            }
            context.stroke();
            context.restore();
          }
        }
      }
      if (this.cell) {
        const [column, row] = this.cell;
        context.strokeStyle = colour("--ink");
        context.lineWidth = 2;
        context.strokeRect(column * width / this.columns - 1, row * ROW, width / this.columns + 2, ROW - 1);
      }
    }

    // The axis of the steps: as many labels as there is room for, each under its column.
    drawSteps() {
      const outer = this.steps.getBoundingClientRect(), inner = this.canvas.getBoundingClientRect();
      const most = Math.max(2, Math.min(this.columns, Math.floor(inner.width / 90)));
      const columns = [...new Set(Array.from({ length: most }, (_, i) => Math.round(i * (this.columns - 1) / Math.max(1, most - 1))))];
      this.steps.replaceChildren(...columns.map((column, i) => {
        const label = element("span", {}, `${i ? "" : "step "}${whole(this.heat.first[column])}`);
        label.style.left = `${inner.left - outer.left + (column + 0.5) / this.columns * inner.width}px`;
        label.className = i === 0 ? "first" : i === columns.length - 1 ? "last" : "";
        return label;
      }));
    }

    point(column, row, aloud = false) {
      this.readout.setAttribute("aria-live", aloud ? "polite" : "off");
      const inside = column !== null && row >= 0 && row < this.heat?.names.length && column >= 0 && column < this.columns;
      this.cell = inside ? [column, row] : null;
      this.draw();
      if (!inside) {
        this.readout.textContent = "";
        return;
      }
      const { first, last, names } = this.heat;
      const value = this.value(column, row);
      this.readout.replaceChildren(
        element("span", { class: "step" }, between(first[column], last[column], (v) => `step ${whole(v)}`).replace("to step", "to")),
        element("span", { class: "name" }, names[row]),
        element("span", { class: "value" }, value === null ? "not measured" : this.map.show(value)));
    }

    onKey(event) {
      const [column, row] = this.cell ?? [0, -1];
      const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      const move = moves[event.key];
      if (!move || !this.heat) return;
      event.preventDefault();
      const clamp = (value, most) => Math.max(0, Math.min(most - 1, value));
      this.point(clamp(column + move[0], this.columns), clamp(row + move[1], this.heat.names.length), true);
    }

    fillTable() {
      if (!this.details.open || !this.heat) return;
      const worstFirst = this.name === "headroom" ? (a, b) => a - b : (a, b) => b - a;
      const body = element("tbody");
      this.heat.names.forEach((name, row) => {
        const values = [];
        for (let column = 0; column < this.columns; column++) {
          const value = this.value(column, row);
          if (value !== null) values.push([value, column]);
        }
        if (!values.length) return;
        const [worst, at] = [...values].sort((a, b) => worstFirst(a[0], b[0]))[0];
        body.append(element("tr", {}, element("th", { scope: "row", class: "name" }, name),
          element("td", {}, this.map.show(values[0][0])), element("td", {}, this.map.show(worst)),
          element("td", {}, whole(this.heat.first[at])), element("td", {}, this.map.show(values.at(-1)[0]))));
      });
      const columns = ["tensor", "at first", this.name === "headroom" ? "lowest" : "highest", "at step", "at last"];
      const head = element("tr", {}, ...columns.map((text) => element("th", { scope: "col" }, text)));
      $(".table", this.details).replaceChildren(element("table", {}, element("thead", {}, head), body));
    }
  }

  // ---- Exponent histogram ---------------------------------------------------------------

  // What becomes of numbers if their scale is multiplied by 2 ** shift.
  function outcome(counts, first, total, format, shift, nonfinite) {
    let zero = 0, subnormal = 0, over = nonfinite, partly = 0;
    const last = Math.floor(Math.log2(format.largest));
    counts.forEach((count, i) => {
      const exponent = first + i + shift;
      if (exponent > last) over += count;
      else if (exponent === last && format.largest < 1.99 * 2 ** last) partly += count;
      if (exponent < format.smallest - 1) zero += count;
      else if (exponent < format.smallest_normal) subnormal += count;
    });
    const share = 1 / Math.max(1, total);
    return { zero: zero * share, subnormal: subnormal * share, over: over * share, overMost: (over + partly) * share };
  }

  class Histogram {
    constructor(figure) {
      this.figure = figure;
      this.tensor = $("#tensor");
      this.sample = $("#sample");
      this.slider = $("#shift");
      this.picture = $(".picture", figure);
      for (const control of [this.tensor, this.sample]) control.addEventListener("change", () => this.draw());
      this.slider.addEventListener("input", () => this.draw());
      $("details", figure).addEventListener("toggle", () => this.draw());
    }

    async show(run) {
      const found = run.histograms;
      this.figure.classList.toggle("empty", !found);
      this.found = found;
      if (!found) return;
      found.arrays ??= inflate(found.data).then((bytes) => {
        const read = rowReader(bytes), rows = found.steps.length * found.names.length;
        return { counts: read.floats(rows * found.bins), sizes: read.floats(rows), zeros: read.floats(rows), nonfinite: read.floats(rows) };
      });
      this.arrays = await found.arrays;
      const options = (select, texts, chosen) => {
        select.replaceChildren(...texts.map((text, i) => {
          const option = element("option", { value: i }, text);
          option.selected = i === chosen;
          return option;
        }));
      };
      options(this.tensor, found.names, 0);
      options(this.sample, found.steps.map((step) => `step ${whole(step)}`), found.chosen);
      this.run = run;
      this.draw();
    }

    draw() {
      if (!this.found) return;
      const { found, arrays } = this;
      const sample = Number(this.sample.value), row = sample * found.names.length + Number(this.tensor.value);
      const counts = [...arrays.counts.slice(row * found.bins, (row + 1) * found.bins)];
      const size = arrays.sizes[row], zeros = arrays.zeros[row], nonfinite = arrays.nonfinite[row];
      const shift = Number(this.slider.value), scale = found.scales[sample];
      const text = `${scaleText(scale * 2 ** shift)}${shift ? `, ${shift > 0 ? "×" : "÷"} ${power(Math.abs(shift))}` : ", as recorded"}`;
      $("#shift-text").textContent = text;
      this.slider.setAttribute("aria-valuetext", text);
      this.drawBars(counts, size, shift);
      this.drawOutcomes(counts, size, zeros, nonfinite, shift);
      this.fillTable(counts, size, zeros, nonfinite, shift);
    }

    drawBars(counts, size, shift) {
      const { found } = this;
      const formats = Object.entries(DATA.formats);
      const width = this.picture.clientWidth, narrow = width < 520;
      const left = 8, right = 8, top = 12, bars = 150, line = 24;
      const low = Math.min(-27, found.first - 2), high = Math.max(19, found.first + found.bins + 2);
      const x = (exponent) => left + (exponent - low) / (high - low) * (width - left - right);
      const height = top + bars + 30 + formats.length * line;
      const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
      const pattern = svg("pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
        svg("rect", { class: "hatch", width: 1.6, height: 5 }));
      picture.append(svg("defs", {}, pattern));
      const own = DATA.formats[this.run.dtype];
      const limit = own ? Math.floor(Math.log2(own.largest)) : Infinity;
      const most = Math.max(...counts, 1);
      counts.forEach((count, i) => {
        const exponent = found.first + i + shift;
        if (!count || exponent + 1 < low || exponent > high) return;
        const tall = Math.max(1.5, count / most * bars);
        const kind = exponent > limit ? "over" : own && exponent < own.smallest - 1 ? "zero" : own && exponent < own.smallest_normal ? "small" : "kept";
        picture.append(svg("rect", { class: `bar ${kind}`, x: x(exponent) + 0.5, y: top + bars - tall, width: Math.max(1, x(exponent + 1) - x(exponent) - 1), height: tall }));
      });
      picture.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: top + bars + 0.5, y2: top + bars + 0.5 }));
      const every = narrow ? 8 : 4;
      for (let exponent = Math.ceil(low / every) * every; exponent <= high; exponent += every) {
        const label = svg("text", { class: "tick", x: x(exponent), y: top + bars + 18, "text-anchor": "middle" });
        label.textContent = power(exponent);
        picture.append(label);
      }
      formats.forEach(([name, format], i) => {
        const y = top + bars + 38 + i * line;
        const clamp = (exponent) => Math.max(left, Math.min(width - right, x(exponent)));
        const top_ = Math.log2(format.largest);
        const group = svg("g", { class: name === this.run.dtype ? "format own" : "format" });
        group.append(svg("rect", { class: "subnormal", x: clamp(format.smallest), y: y - 3, width: clamp(format.smallest_normal) - clamp(format.smallest), height: 6 }));
        group.append(svg("rect", { class: "normal", x: clamp(format.smallest_normal), y: y - 3, width: clamp(top_) - clamp(format.smallest_normal), height: 6 }));
        const label = svg("text", { class: "label", x: Math.max(left, clamp(format.smallest_normal) + 4), y: y + 14 });
        label.textContent = name.replace("_", " ");
        group.append(label);
        picture.append(group);
      });
      this.picture.replaceChildren(picture);
    }

    drawOutcomes(counts, size, zeros, nonfinite, shift) {
      const body = $("#outcomes tbody");
      const rows = Object.entries(DATA.formats).map(([name, format]) => {
        const found = outcome(counts, this.found.first, size, format, shift, nonfinite);
        const over = found.over === found.overMost ? percent(found.over) : `${percent(found.over)} to ${percent(found.overMost)}`;
        const row = element("tr", { "data-format": name }, element("th", { scope: "row" }, name.replace("_", " ")),
          element("td", {}, percent(found.zero)), element("td", {}, percent(found.subnormal)), element("td", {}, over));
        if (name === this.run.dtype) row.className = "own";
        return row;
      });
      body.replaceChildren(...rows);
      const texts = [];
      if (nonfinite) texts.push(`${percent(nonfinite / size)} of ${whole(size)} numbers were not finite. They count as overflow, and the picture does not show them.`);
      if (zeros) texts.push(`${percent(zeros / size)} of ${whole(size)} numbers were stored as zero. The picture cannot say which of them a higher scale would bring back.`);
      $("#zeros").textContent = texts.join(" ");
    }

    fillTable(counts, size, zeros, nonfinite, shift) {
      const details = $("details", this.figure);
      if (!details.open) return;
      const body = element("tbody", {}, element("tr", {}, element("th", { scope: "row" }, "zero"), element("td", {}, whole(zeros)), element("td", {}, percent(zeros / Math.max(1, size)))));
      counts.forEach((count, i) => {
        if (!count) return;
        body.append(element("tr", {}, element("th", { scope: "row" }, power(this.found.first + i + shift)), element("td", {}, whole(count)), element("td", {}, percent(count / Math.max(1, size)))));
      });
      if (nonfinite) body.append(element("tr", {}, element("th", { scope: "row" }, "not finite"), element("td", {}, whole(nonfinite)), element("td", {}, percent(nonfinite / size))));
      const head = element("tr", {}, ...["magnitude from", "numbers", "share"].map((text) => element("th", { scope: "col" }, text)));
      $(".table", details).replaceChildren(element("table", {}, element("thead", {}, head), body));
    }
  }

  // ---- The page -------------------------------------------------------------------------

  function drawKeys() {
    for (const key of document.querySelectorAll(".line-key")) {
      const index = Number(key.dataset.run);
      key.replaceChildren(svg("svg", { viewBox: "0 0 28 8", width: 28, height: 8, "aria-hidden": "true" },
        svg("line", { class: `run-line run-${index % 6}`, x1: 0, x2: 28, y1: 4, y2: 4, "stroke-dasharray": DASHES[index % DASHES.length].join(" ") })));
    }
  }

  // Tables that are wider than the window say so, and can be scrolled with the keyboard.
  function hintAtWideTables() {
    for (const table of document.querySelectorAll(".table.whole")) {
      const isWide = table.scrollWidth > table.clientWidth + 1;
      if (isWide && !table.nextElementSibling?.matches(".scroll-hint")) {
        table.after(element("p", { class: "sub scroll-hint" }, "The table goes on to the right: scroll it sideways."));
      }
      table.classList.toggle("wide", isWide);
      if (isWide) table.setAttribute("tabindex", "0");
      else table.removeAttribute("tabindex");
    }
  }

  function start() {
    cells = Math.max(120, Math.min(900, Math.round((document.querySelector(".plot")?.clientWidth ?? 600) * 0.75)));
    for (const figure of document.querySelectorAll("[data-chart]")) charts.push(new Chart(figure));
    const maps = [...document.querySelectorAll("[data-map]")].map((figure) => new HeatMap(figure));
    const histogram = new Histogram($("#histogram"));
    drawKeys();

    const actions = {
      "zoom-in": () => zoom(0.5), "zoom-out": () => zoom(2), "pan-left": () => pan(-0.5), "pan-right": () => pan(0.5),
      whole: () => showRange(firstStep, lastStep),
    };
    for (const [id, action] of Object.entries(actions)) $(`#${id}`).addEventListener("click", action);
    for (const id of ["from", "to"]) {
      $(`#${id}`).addEventListener("change", () => showRange(Number($("#from").value), Number($("#to").value)));
    }
    for (const figure of document.querySelectorAll(".plot")) {
      figure.addEventListener("dblclick", () => showRange(firstStep, lastStep));
    }
    for (const box of document.querySelectorAll(".toggle-run")) {
      box.addEventListener("change", () => {
        const index = Number(box.value);
        box.checked ? hidden.delete(index) : hidden.add(index);
        drawCharts();
      });
    }
    const chooser = $("#run");
    const showTensors = () => {
      const run = RUNS[Number(chooser?.value ?? DATA.tensor_run)];
      $("#tensors").classList.toggle("without", !run.heat);
      return Promise.all([...maps.map((map) => map.show(run)), histogram.show(run)]);
    };
    chooser?.addEventListener("change", showTensors);
    Promise.all([showTensors(), showRange(firstStep, lastStep)])
      .then(() => {
        hintAtWideTables();
        document.documentElement.dataset.ready = "yes";
      });

    const redraw = () => {
      for (const chart of charts) chart.shape = null;
      drawCharts();
      for (const map of maps) map.redraw();
      hintAtWideTables();
      histogram.draw();
    };
    let width = document.body.clientWidth;
    new ResizeObserver(() => {
      if (document.body.clientWidth !== width) {
        width = document.body.clientWidth;
        redraw();
      }
    }).observe(document.body);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  start();
})();
