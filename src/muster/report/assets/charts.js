/* The charts of one run, by time, step or tokens. `report` and `series`: as the page of a report holds them.
   `kept`: what another one's `kept()` gave, so that a page that grows shows the same part again.
   `grows`: what has nothing to draw yet is left out. */
muster.charts = (report, series, kept, grows) => {
  const { COLORS, known, number, percent, usd, bytes, span, short, label, el, say, color } = muster;

  // A short pause keeps its true width in a lane; a short loss stays visible.
  const LOSSES = new Set(["detect", "restart", "redone", "wait", "out", "unfinished"]);
  const SPACES = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
  const BINARY = Array.from({ length: 40 }, (_, n) => 2 ** (n + 10));
  const some = (column) => column.some(known);
  const free = report.cost.usd === 0, together = `run-${report.run_id}`;
  const clock = (value) => muster.clock(value, view && view.max - view.min < 20);

  // ------------------------------------------------------------ what is on the x axis

  // Moments without the pauses before them in which nothing was held.
  const pauses = series.pauses || [];
  function held(t) {
    let before = 0;
    for (const [from, to] of pauses) if (t > from) before += Math.min(t, to) - from;
    return t - before;
  }
  const left_out = pauses.reduce((sum, [from, to]) => sum + to - from, 0);

  const s = series.steps, seen_of = new Map();
  s.step.forEach((step, i) => { if (known(s.seen[i])) seen_of.set(step, s.seen[i]); });
  const last = Math.max(1, ...seen_of.keys()), most = Math.max(1, ...seen_of.values());
  const BY = {
    time: { label: "time", end: Math.max(1e-3, held(report.wall_s)), format: clock, incrs: SPACES },
    step: { label: "steps", end: last, format: (value) => number(value), place: (row) => row.step },
    tokens: { label: "tokens", end: most, format: short, place: (row) => row.seen ?? seen_of.get(row.step) },
  };
  let by = kept && kept.by in BY ? kept.by : "time";
  let view = { min: 0, max: BY[by].end }, plots = [], moving = false;
  if (kept && kept.view) view = { min: kept.view.min, max: Math.min(kept.view.max, BY[by].end) };
  const end = () => BY[by].end;

  // Rows of a table that has steps, in the order of the x axis; of two at one place the later.
  function columns(table, names, taken) {
    if (by === "time") return [table.t.map(held), ...names.map((name) => table[name])];
    const rows = new Map();
    table.step.forEach((step, i) => {
      const row = { step, seen: table.seen[i] }, x = known(step) ? BY[by].place(row) : null;
      if (known(x) && (!taken || taken(i))) rows.set(x, i);
    });
    const order = [...rows.keys()].sort((a, b) => a - b);
    return [order, ...names.map((name) => order.map((x) => table[name][rows.get(x)]))];
  }

  // Rows of a table that has moments alone: where the kept steps were at each.
  const passed = s.t.map((t, i) => [t, i]).filter(([, i]) => known(s.seen[i]));
  function place(t) {
    let low = 0, high = passed.length;
    while (low < high) { const middle = (low + high) >> 1; if (passed[middle][0] <= t) low = middle + 1; else high = middle; }
    return low ? (by === "step" ? s.step : s.seen)[passed[low - 1][1]] : 0;
  }
  function moments(table, names) {
    if (by === "time") return [table.t.map(held), ...names.map((name) => table[name])];
    const rows = new Map(table.t.map((t, i) => [place(t), i])), order = [...rows.keys()].sort((a, b) => a - b);
    return [order, ...names.map((name) => order.map((x) => table[name][rows.get(x)]))];
  }

  // From where to where an incident is on the axis; null: not at all.
  function span_of(found) {
    if (by !== "time") {
      const x = known(found.step) ? BY[by].place({ step: found.step }) : place(found.at_s);
      return known(x) ? [x, x] : null;
    }
    return [held(found.at_s), known(found.resumed_s) ? held(found.resumed_s) : end()];
  }

  // ------------------------------------------------------------ moving along it

  function move(min, max, from) {
    const width = Math.min(Math.max(max - min, end() / 20000), end());
    min = Math.min(Math.max(min, 0), end() - width);
    view = { min, max: min + width };
    moving = true;
    for (const plot of plots) if (plot !== from || plot.scales.x.min !== view.min || plot.scales.x.max !== view.max) plot.setScale("x", view);
    moving = false;
  }
  const showing = () => say(`Showing ${BY[by].format(view.min)} to ${BY[by].format(view.max)}`);
  const zoom = (factor) => { const middle = (view.min + view.max) / 2, half = ((view.max - view.min) * factor) / 2; move(middle - half, middle + half); showing(); };
  const pan = (share) => { const step = (view.max - view.min) * share; move(view.min + step, view.max + step); showing(); };
  const reset = () => { move(0, end()); showing(); };
  let nearest = -1;
  function incident(step) {
    const found = report.incidents;
    if (!found.length) return;
    nearest = (nearest + step + found.length) % found.length;
    show(found[nearest]);
  }
  function show(found) {
    const at = span_of(found);
    if (at) {
      const until = by !== "time" || known(found.resumed_s) ? at[1] : Math.min(end(), held(found.detected_s) + 30);
      const margin = Math.max(by === "time" ? 2 : end() / 50, (until - at[0]) * 0.6);
      move(at[0] - margin, until + margin);
    }
    say(found.sentence);
  }
  function key(event) {
    const act = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: reset, Escape: reset, n: () => incident(1), p: () => incident(-1) }[event.key];
    if (act && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); act(); }
  }

  // ------------------------------------------------------------ one chart

  function axes(values, size, incrs) {
    const line = { stroke: color("--soft"), grid: { stroke: color("--faint"), width: 1 }, ticks: { stroke: color("--line"), width: 1, size: 5 }, font: "11.5px system-ui, sans-serif" };
    return [{ ...line, incrs: BY[by].incrs, space: 74, size: 30, values: (u, found) => found.map(BY[by].format) }, { ...line, size: size || 56, incrs, values: (u, found) => found.map(values) }];
  }

  function marks(u, edges_only) {
    const ctx = u.ctx, { left, top, width, height } = u.bbox;
    ctx.save(); ctx.beginPath(); ctx.rect(left, top, width, height); ctx.clip();
    for (const found of report.incidents) {
      const at = found.stopped_training && span_of(found);
      if (!at) continue;
      const a = u.valToPos(at[0], "x", true), b = u.valToPos(at[1], "x", true);
      ctx.fillStyle = COLORS.detect; ctx.globalAlpha = 0.1; if (!edges_only && by === "time") ctx.fillRect(a, top, Math.max(2, b - a), height);
      ctx.globalAlpha = 0.7; ctx.fillRect(a, top, devicePixelRatio, height);
    }
    ctx.globalAlpha = 1; ctx.strokeStyle = color("--soft"); ctx.lineWidth = 1.5 * devicePixelRatio; ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
    if (by === "time") for (const [from] of pauses) {
      const x = u.valToPos(held(from), "x", true);
      ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + height); ctx.stroke();
    }
    ctx.restore();
  }

  const follow = (u, name) => { if (name === "x" && !moving) move(u.scales.x.min, u.scales.x.max, u); };
  const cursor = (points) => ({ y: false, sync: { key: together, scales: ["x", null] }, drag: { x: true, y: false, setScale: true }, points });

  function chart(title, about, table, lines, given) {
    const box = el("div", { class: given.full ? "chart full" : "chart" }, el("h3", null, title, about ? el("span", { class: "about" }, about) : null));
    const has = table && table[0].length && lines.some((_, i) => some(table[i + 1]));
    if (!has) { box.append(el("div", { class: "none" }, given.none || "The log holds nothing to draw here.")); return { box, make: () => null }; }
    const place = el("div", { tabindex: "0", role: "img", "aria-label": `${title}. ${given.said || ""} Arrow keys pan, plus and minus zoom, 0 resets.`, onkeydown: key });
    box.append(place);
    const make = () => {
      const options = {
        width: Math.max(160, place.clientWidth), height: given.height || 190, padding: [10, 8, 0, 0],
        scales: { x: { time: false, range: (u, min, max) => [min, max] }, y: given.y || {} },
        axes: axes(given.format || short, given.size, given.incrs),
        legend: { live: true, isolate: false },
        cursor: cursor({ size: 6 }),
        series: [{ label: by === "time" ? "at" : by, value: (u, value) => (known(value) ? BY[by].format(value) : "–") },
          ...lines.map((line) => ({
            label: line.label, stroke: color(line.color) || line.color, width: line.width || 1.6, dash: line.dash, spanGaps: line.spanGaps || false,
            points: { show: line.points || undefined, size: line.points ? 7 : 4 },
            fill: line.fill ? `color-mix(in srgb, ${color(line.color)} 12%, transparent)` : undefined,
            value: (u, value) => (known(value) ? (line.value || given.value || short)(value) : "–"),
          }))],
        hooks: { drawClear: [(u) => marks(u, false)], setScale: [follow] },
      };
      const plot = new uPlot(options, table, place);
      plot.over.addEventListener("dblclick", reset);
      return plot;
    };
    return { box, make, place };
  }

  function joined(...tables) {
    return tables.length === 1 ? tables[0] : uPlot.join(tables, tables.map((table) => table.slice(1).map(() => 1)));
  }

  function lanes() {
    const rows = series.lanes.map((row) => ({ ...row, segments: row.segments.map(([a, b, ...rest]) => [held(a), held(b), ...rest]) })), count = rows.length;
    const box = el("div", { class: "chart full" }, el("h3", null, "What every host was doing", el("span", { class: "about" }, "drag to zoom, hover for details")));
    if (!count) { box.append(el("div", { class: "none" }, "No host appears in the log.")); return { box, make: () => null }; }
    const place = el("div", { tabindex: "0", role: "img", "aria-label": `Lanes of ${count} hosts over time. The table of categories holds the sums. Arrow keys pan, plus and minus zoom, n and p go through incidents.`, onkeydown: key });
    const used = new Set(rows.flatMap((row) => row.segments.map((segment) => segment[2])));
    box.append(place, el("div", { class: "legend" }, series.states.map((name, position) => used.has(position) ? el("span", null, el("span", { class: "swatch", style: { background: COLORS[name] } }), label(name)) : null)));
    const height = Math.max(7, Math.min(30, 560 / count)), every = Math.ceil(13 / height);
    const longest = Math.min(150, 16 + 6.6 * Math.max(...rows.map((row) => row.host.length)));
    const paint = (u) => {
      const ctx = u.ctx, { left, top, width, height: tall } = u.bbox, low = u.scales.x.min, high = u.scales.x.max;
      ctx.save(); ctx.beginPath(); ctx.rect(left, top, width, tall); ctx.clip();
      rows.forEach((row, position) => {
        const y0 = u.valToPos(position + 0.12, "y", true), y1 = u.valToPos(position + 0.88, "y", true);
        for (const [a, b, state] of row.segments) {
          if (b < low || a > high) continue;
          const x0 = Math.max(left, u.valToPos(a, "x", true)), x1 = Math.min(left + width, u.valToPos(b, "x", true));
          ctx.fillStyle = COLORS[series.states[state]];
          ctx.fillRect(x0, Math.min(y0, y1), Math.max(x1 - x0, LOSSES.has(series.states[state]) ? devicePixelRatio : 0), Math.abs(y1 - y0));
        }
      });
      ctx.restore();
    };
    const hover = (u) => {
      const tip = document.getElementById("tip"), { left, top } = u.cursor;
      if (!(left >= 0) || !u.over.matches(":hover")) { tip.hidden = true; return; }
      const t = u.posToVal(left, "x"), row = rows[Math.floor(u.posToVal(top, "y"))];
      const found = row && row.segments.find(([a, b]) => a <= t && t < b);
      if (!found) { tip.hidden = true; return; }
      const name = series.states[found[2]], why = report.incidents.find((other) => other.incident_id === series.incidents[found[3]]);
      const meaning = name === "train" ? "training steps" : report.categories[name].meaning;
      tip.replaceChildren(el("b", null, `${row.host}: ${label(name)}`), `${clock(found[0])} to ${clock(found[1])} (${span(found[1] - found[0])}). ${meaning}.`, why ? el("div", null, why.evidence || why.sentence) : "");
      tip.hidden = false;
      const place = u.over.getBoundingClientRect();
      tip.style.left = `${Math.max(8, Math.min(place.left + left + 14, innerWidth - tip.offsetWidth - 12))}px`;
      tip.style.top = `${Math.max(8, place.top + top + 16 + tip.offsetHeight > innerHeight ? place.top + top - tip.offsetHeight - 12 : place.top + top + 16)}px`;
    };
    const make = () => {
      const both = axes((value) => value, longest);
      both[1] = { ...both[1], size: longest, grid: { show: false }, ticks: { show: false }, splits: () => rows.map((_, i) => i + 0.5).filter((_, i) => i % every === 0), values: (u, found) => found.map((value) => { const name = rows[Math.floor(value)].host; return name.length > 20 ? `…${name.slice(-19)}` : name; }) };
      const plot = new uPlot({
        width: Math.max(160, place.clientWidth), height: Math.round(count * height + 38), padding: [6, 8, 0, 0],
        scales: { x: { time: false, range: (u, min, max) => [min, max] }, y: { range: () => [0, count], dir: -1 } },
        axes: both, legend: { show: false }, series: [{}, { show: true, stroke: "transparent", points: { show: false } }],
        cursor: cursor({ show: false }),
        hooks: { drawClear: [(u) => marks(u, false)], draw: [paint, (u) => marks(u, true)], setCursor: [hover], setScale: [follow] },
      }, [[0, end()], [null, null]], place);
      plot.over.addEventListener("dblclick", reset);
      plot.over.addEventListener("mouseleave", () => { document.getElementById("tip").hidden = true; });
      return plot;
    };
    return { box, make, place };
  }

  // ------------------------------------------------------------ which charts there are

  const share = { range: (u, min, max) => [0, Math.max(1, known(max) ? max : 1)] };
  const from_zero = (most, least = 0) => ({ range: (u, min, max) => [0, Math.max(max * most, least)] });
  const short_span = (value) => (value >= 7200 ? `${+(value / 3600).toPrecision(3)} h` : value >= 120 ? `${+(value / 60).toPrecision(3)} min` : `${+value.toPrecision(3)} s`);
  const short_bytes = (value) => (value >= 2 ** 30 ? `${+(value / 2 ** 30).toPrecision(3)} GiB` : `${+(value / 2 ** 20).toPrecision(3)} MiB`);
  const whole = { y: share, format: (value) => `${Math.round(value * 100)} %`, value: (value) => percent(value) };
  const sizes = { y: from_zero(1.1, 2 ** 20), format: short_bytes, value: bytes, size: 78, incrs: BINARY };
  // A saw-tooth has two values at one moment: the second moves by a microsecond, so that times rise.
  const nudged = (times) => times.map((t, position) => held(t) + (position && times[position - 1] === t ? 1e-6 : 0));
  const kept_step = (i) => known(s.seen[i]);

  function learning() {
    const R = report.goodput.reference, found = [];
    const tables = [columns(s, ["loss"], kept_step)], lines = [{ label: "training", color: "--c1" }];
    const lost = columns(s, ["lost_loss"], (i) => known(s.lost_loss[i]));
    if (some(lost[1])) { tables.push(lost); lines.push({ label: "lost steps", color: "--bad", dash: [3, 3] }); }
    if (some(series.evals.loss)) { tables.push(columns(series.evals, ["loss"])); lines.push({ label: "held-out", color: "--c3", points: true, spanGaps: true, dash: [5, 4] }); }
    if (!s.t.length || some(s.loss) || some(series.evals.loss)) found.push(chart("Loss", some(s.accuracy) || some(s.margin) ? "mean per preference" : "mean per supervised token", s.t.length || some(series.evals.loss) ? joined(...tables) : null, lines, { value: (value) => value.toFixed(4), said: `Ends at ${number(report.final_loss, 4)}.`, none: "No step has a loss yet." }));
    if (some(series.evals.execution_accuracy)) found.push(chart("Execution accuracy", "held-out questions whose SQL gives the right rows", columns(series.evals, ["execution_accuracy"]), [{ label: "accuracy", color: "--good", points: true, spanGaps: true, width: 2 }], whole));
    if (some(s.accuracy) || some(series.evals.accuracy)) found.push(chart("Preference accuracy", "pairs whose better answer has the higher reward", joined(columns(s, ["accuracy"], kept_step), columns(series.evals, ["accuracy"])), [{ label: "training", color: "--c1" }, { label: "held-out", color: "--c3", points: true, spanGaps: true, dash: [5, 4] }], whole));
    if (some(s.margin)) found.push(chart("Rewards", "of better and worse answers, and the margin between them", columns(s, ["rewards_chosen", "rewards_rejected", "margin"], kept_step), [{ label: "better", color: "--good" }, { label: "worse", color: "--bad" }, { label: "margin", color: "--c2" }], { value: (value) => value.toFixed(4) }));
    const rate = columns(s, ["tokens_per_s"], kept_step), rate_lines = [{ label: "tokens/s", color: "--c4" }];
    if (R && rate[0].length) { rate.push(rate[0].map(() => R.tokens_per_s)); rate_lines.push({ label: "reference R*", color: "--soft", dash: [6, 4], width: 1.2 }); }
    found.push(chart("Throughput", "tokens per second, all ranks", rate, rate_lines, { y: from_zero(1.08), value: (value) => number(value) }));
    if (some(s.mfu) || !free) found.push(chart("MFU", "model FLOPs against peak", columns(s, ["mfu"], kept_step), [{ label: "MFU", color: "--c2" }], { y: from_zero(1.15, 0.01), format: (value) => `${+(value * 100).toPrecision(3)} %`, value: (value) => percent(value, 1), none: "Unknown: the log holds no MFU (no peak FLOPs for this device)." }));
    if (some(s.grad_norm)) found.push(chart("Gradient norm", "before clipping", columns(s, ["grad_norm"], kept_step), [{ label: "norm", color: "--c3" }], { y: from_zero(1.08) }));
    if (some(s.expert_load_max)) found.push(chart("Load of experts", "the busiest over the mean of its layer", columns(s, ["expert_load_max"], kept_step), [{ label: "largest", color: "--c2" }], { y: from_zero(1.08, 2), value: (value) => `${value.toFixed(2)} times the mean` }));
    if (some(s.expert_idle_share)) found.push(chart("Idle experts", "share without a token, all layers", columns(s, ["expert_idle_share"], kept_step), [{ label: "idle", color: "--bad" }], whole));
    return found;
  }

  function account() {
    const g = series.goodput, cost = series.cost, found = [];
    found.push(chart("Goodput", "tokens of the final state against R*, since the first purchase", g && moments(g, ["active", "purchased", "lately"]),
      [{ label: "active hosts", color: "--good", width: 2.2, fill: true }, { label: "purchased hosts", color: "--c2", width: 1.8 }, { label: "lately (active)", color: "--soft", width: 1, dash: [3, 3] }],
      { ...whole, full: true, height: 220, none: "No reference rate: the log holds fewer than five clean steps.", said: `Ends at ${percent(report.goodput.active)} of active hosts.` }));
    if (!free) found.push(chart("Cost", "dollars so far", cost && moments(cost, ["usd"]), [{ label: "spent", color: "--c1", fill: true }], { y: from_zero(1.08, 0.01), format: (value) => `$${short(value)}`, value: usd, none: "Unknown: a host has no price in the log." }));
    return found;
  }

  function machines() {
    const w = series.usage, found = [], at = w.t.map(held);
    const pair = (mean, other, hue) => [{ label: mean, color: hue }, { label: other, color: "--soft", dash: [3, 3], width: 1.2 }];
    const tiers = Object.entries(series.ages), hues = { memory: "--c4", peer: "--c1", disk: "--c3", bucket: "--c2" };
    found.push(chart("Work at risk", "age of the newest restorable state, by tier", tiers.length ? joined(...tiers.map(([, saw]) => [nudged(saw.t), saw.age])) : null,
      tiers.map(([tier]) => ({ label: tier, color: hues[tier] || "--soft", spanGaps: true })), { y: from_zero(1.08, 0.001), format: short_span, value: span, none: "No checkpoint was committed.", size: 64, incrs: SPACES }));
    if (some(w.gpu_busy)) found.push(chart("GPUs", "share of the time in which they computed", [at, w.gpu_busy, w.gpu_busy_least], pair("mean", "least busy", "--c4"), whole));
    if (some(w.gpu_memory_bytes)) found.push(chart("Memory of GPUs", "in use", [at, w.gpu_memory_bytes, w.gpu_memory_most_bytes], pair("mean", "most", "--c4"), sizes));
    if (some(w.busy)) found.push(chart("Processors", "share of hosts' processors that work", [at, w.busy, w.busy_most], pair("mean host", "busiest", "--c1"), whole));
    if (some(w.cpu_s)) found.push(chart("Processor time of a step", "ranks of one host, all threads", [at, w.cpu_s], [{ label: "mean host", color: "--c2" }], { y: from_zero(1.1), format: short_span, value: span }));
    if (w.network_bytes.some((value) => value > 0)) found.push(chart("Network in a step", "in and out of one host, loopback left out", [at, w.network_bytes, w.network_most_bytes], pair("mean host", "most", "--c3"), sizes));
    if (some(w.memory_bytes)) found.push(chart("Memory of hosts", "in use", [at, w.memory_bytes, w.memory_most_bytes], pair("mean host", "most", "--c2"), sizes));
    return found;
  }

  function all() {
    const memory = chart("Memory", "peak on rank 0", columns(s, ["memory_bytes"], kept_step), [{ label: "memory", color: "--c3" }], { y: from_zero(1.1), format: short_bytes, value: bytes, size: 68, incrs: BINARY });
    return [...learning(), ...account(), ...(by === "time" ? [lanes(), memory, ...machines()] : [memory])];
  }

  // ------------------------------------------------------------ the section

  let drawn = [];
  const grid = el("div", { class: "grid" }), note = el("p", { class: "sub" });
  const choices = Object.entries(BY).map(([name, axis]) => el("button", { type: "button", "data-by": name, onclick: () => choose(name) }, axis.label));
  const tools = el("div", { class: "tools" }, el("h2", null, "Over time"), el("span", { class: "switch", role: "group", "aria-label": "What the charts are drawn by" }, choices),
    [["Zoom in", "+", () => zoom(0.5)], ["Zoom out", "−", () => zoom(2)], ["Earlier", "←", () => pan(-0.25)], ["Later", "→", () => pan(0.25)], ["Whole run", "reset", reset]].map(([name, text, act]) =>
      el("button", { type: "button", "aria-label": name, title: name, onclick: act }, text)),
    el("span", { class: "hint" }, el("kbd", null, "←"), " ", el("kbd", null, "→"), " pan  ", el("kbd", null, "+"), " ", el("kbd", null, "−"), " zoom  ", el("kbd", null, "0"), " reset  ", el("kbd", null, "n"), " ", el("kbd", null, "p"), " incidents"));
  const node = el("section", { class: "card charts", onkeydown: (event) => { if (event.target.closest("button")) key(event); } }, tools, note, grid);

  function fill() {
    for (const button of choices) button.setAttribute("aria-pressed", String(button.dataset.by === by));
    tools.querySelector("h2").textContent = `Over ${BY[by].label}`;
    note.textContent = by !== "time" ? "What hosts did and used is drawn by time alone."
      : left_out ? `${pauses.length === 1 ? "A pause" : `${pauses.length} pauses`} in which nothing was held (${span(left_out)}) ${pauses.length === 1 ? "is" : "are"} left out, at the dotted line${pauses.length === 1 ? "" : "s"}.` : "";
    note.hidden = !note.textContent;
    drawn = all().filter((one) => one.place || !grows);
    grid.replaceChildren(...(drawn.length ? drawn.map((one) => one.box) : [el("p", { class: "sub" }, "No step yet.")]));
  }
  function choose(name) {
    if (name === by) return;
    by = name;
    view = { min: 0, max: end() };
    fill();
    draw();
    say(`Drawn by ${BY[by].label}`);
  }
  // To be called once the section is in the document, and after a change of theme.
  function draw() {
    for (const plot of plots) plot.destroy();
    const { min, max } = view;
    plots = [];
    plots = drawn.map((one) => one.make()).filter(Boolean);
    move(min, max);
  }
  let timer = null;
  const watching = new ResizeObserver(() => {
    clearTimeout(timer);
    timer = setTimeout(() => drawn.forEach((one) => { const plot = plots.find((found) => found.root.parentNode === one.place); if (plot && one.place.clientWidth) plot.setSize({ width: one.place.clientWidth, height: plot.height }); }), 60);
  });
  watching.observe(grid);
  const remove = () => { watching.disconnect(); clearTimeout(timer); for (const plot of plots) plot.destroy(); plots = []; node.remove(); };

  fill();
  return { node, draw, show, held, remove, kept: () => ({ by, view: view.min === 0 && view.max >= end() ? null : view }) };
};
