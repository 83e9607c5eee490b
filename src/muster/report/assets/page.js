"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const report = data.report, series = data.series;
  const root = document.documentElement;
  const COLORS = {
    train: "#2fa36f", productive: "#2fa36f", provision: "#8b98a8", start: "#6d84a3", restore: "#4d8fd6", warmup: "#9b7fe6",
    data_wait: "#35b3d4", checkpoint: "#3d6fe0", straggler: "#d6a314", degraded: "#b0842b", eval: "#20b2a4", detect: "#d93a42",
    restart: "#f07b24", wait: "#f2b13c", unfinished: "#e88aa0", redone: "#b82e72", spare: "#b9c3cf", out: "#7b5a4e",
    hold: "#a79bd0", idle: "#cfc9c0", other: "#93a1b0", unattributed: "#4a4f57",
  };

  // A short pause keeps its true width in a lane; a short loss stays visible.
  const LOSSES = new Set(["detect", "restart", "redone", "wait", "out", "unfinished"]);

  // ------------------------------------------------------------ words

  const UNKNOWN = "unknown";
  const known = (value) => value !== null && value !== undefined;
  const number = (value, digits = 0) =>
    known(value) ? value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }) : UNKNOWN;
  const percent = (value, digits = 2) => (known(value) ? `${(value * 100).toFixed(digits)} %` : UNKNOWN);
  const usd = (value) => (known(value) ? `$${number(value, value === 0 || value >= 1 ? 2 : 4)}` : UNKNOWN);
  const bytes = (value) => (known(value) ? (value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(2)} GiB` : `${(value / 2 ** 20).toFixed(1)} MiB`) : UNKNOWN);
  function span(value) {
    if (!known(value)) return UNKNOWN;
    if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
    if (value < 9.95) return `${value.toFixed(2)} s`;
    if (value < 59.5) return `${value.toFixed(1)} s`;
    const whole = Math.round(value);
    if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
    if (whole < 172800) return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
    return `${(whole / 86400).toFixed(1)} d`;
  }
  function clock(value) {
    // Rounded before it is cut, so that no second is the sixtieth.
    const digits = value % 1 && view && view.max - view.min < 20 ? 1 : 0, t = +Math.abs(value).toFixed(digits);
    const sign = value < 0 ? "-" : "", h = Math.floor(t / 3600), m = Math.floor((t % 3600) / 60);
    const seconds = (t % 60).toFixed(digits).padStart(2, "0");
    return h ? `${sign}${h}:${String(m).padStart(2, "0")}:${seconds}` : `${sign}${m}:${seconds}`;
  }
  function short(value) {
    if (!known(value)) return "";
    const size = Math.abs(value);
    if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
    if (size >= 1e3) return `${+(value / 1e3).toPrecision(3)}k`;
    return String(+value.toPrecision(3));
  }
  const label = (name) => name.replaceAll("_", " ");

  function el(tag, given, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(given || {})) {
      if (key === "style") Object.assign(node.style, value);
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
    }
    for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) node.append(child);
    return node;
  }

  // ------------------------------------------------------------ head and figures

  function head() {
    const outcome = report.outcome || "not finished";
    const tone = { succeeded: "good", failed: "bad" }[outcome] || "warn";
    const facts = [report.name && report.name !== report.run_id ? report.run_id : null, report.backend, report.started && `started ${report.started.replace("T", " ").slice(0, 19)} UTC`, span(report.wall_s)];
    document.getElementById("head").append(
      el("div", null,
        el("h1", null, report.name || report.run_id, el("span", { class: `badge ${tone}` }, outcome)),
        el("div", { class: "sub" }, facts.filter(Boolean).join("  ·  ")),
        report.reason && outcome !== "succeeded" ? el("div", { class: "sub" }, report.reason) : null),
      el("button", { id: "theme", type: "button", onclick: flip }, "Dark"));
  }

  function figure(name, value, more, first) {
    const shown = value === UNKNOWN ? el("div", { class: "value unknown" }, UNKNOWN) : el("div", { class: "value" }, value);
    return el("div", { class: first ? "figure first" : "figure" }, el("div", { class: "name" }, name), shown, more ? el("div", { class: "more" }, more) : null);
  }

  function figures() {
    const g = report.goodput, all = report.incident_kinds.all;
    const rate = g.reference && `R* ${number(g.reference.tokens_per_s)} tokens/s on ${g.reference.world_size} ranks`;
    const accuracy = known(report.baseline_accuracy) ? `majority baseline ${percent(report.baseline_accuracy, 1)}` : null;
    return el("section", { class: "figures", "aria-label": "Headline figures" },
      figure("Goodput, active hosts", percent(g.active), rate, true),
      figure("Goodput, purchased hosts", percent(g.purchased), "spares in the denominator"),
      known(g.fault_tolerance_overhead) ? figure("Fault-tolerance overhead", percent(g.fault_tolerance_overhead), "of a step, against R* measured without it") : null,
      figure("Host-time productive", percent(g.time), `of ${span(report.host_time.purchased_host_s)} host-time`),
      figure("Tokens", report.tokens >= 1e10 ? `${number(report.tokens / 1e9, 2)} B` : number(report.tokens), `${number(report.steps)} steps, each counted once`),
      figure("Tokens/s", number(report.tokens_per_s), known(report.speed.step_s) ? `step ${span(report.speed.step_s)}` : null),
      figure("MFU", percent(report.mfu, 1), known(report.mfu) ? "median of clean steps" : "no peak FLOPs in the log"),
      figure("Final loss", number(report.final_loss, 4), known(report.heldout_loss) ? `held-out ${number(report.heldout_loss, 4)}` : null),
      known(report.execution_accuracy) ? figure("Execution accuracy", percent(report.execution_accuracy, 1), accuracy) : null,
      figure("Cost", usd(report.cost.usd), known(report.cost.usd) ? `${usd(report.cost.usd_per_million_tokens)} per million tokens` : `no price for ${report.cost.hosts_without_price.length} hosts`),
      known(report.cost.usd_per_goodput_point) ? figure("One more goodput point", usd(report.cost.usd_per_goodput_point), "would have saved") : null,
      figure("Interruptions", number(report.interruptions), all && known(all.lost_s_p50) ? `lost p50 ${span(all.lost_s_p50)}, p95 ${span(all.lost_s_p95)}` : null));
  }

  // ------------------------------------------------------------ where the time went

  function categories() {
    const spent = Object.entries(report.categories).filter(([, found]) => found.host_ns > 0);
    if (!spent.length) return null;
    const bar = el("div", { class: "stack", role: "img", "aria-label": spent.map(([name, found]) => `${label(name)} ${percent(found.share)}`).join(", ") },
      spent.map(([name, found]) => el("span", { style: { flex: `${found.share} 1 0`, background: COLORS[name] }, title: `${label(name)}: ${percent(found.share)}` })));
    const rows = spent.map(([name, found]) => el("tr", null,
      el("td", null, el("span", { class: "swatch", style: { background: COLORS[name] } }), label(name)),
      el("td", { class: "n" }, number(found.host_s, 1)), el("td", { class: "n" }, percent(found.share)), el("td", { class: "n" }, usd(found.usd)),
      el("td", { class: "soft meaning" }, found.meaning)));
    const queue = report.host_time.queue_s > 0 ? `, after ${span(report.host_time.queue_s)} in the queue` : "";
    return el("section", { class: "card", id: "categories" }, el("h2", null, `Where ${number(report.host_time.purchased_host_s, 1)} host-seconds went${queue}`), bar,
      el("div", { class: "wide" }, el("table", null,
        el("thead", null, el("tr", null, el("th", null, "went to"), el("th", { class: "n" }, "host-s"), el("th", { class: "n" }, "share"), el("th", { class: "n" }, "cost"), el("th", { class: "meaning" }, "meaning"))),
        el("tbody", null, rows))));
  }

  // ------------------------------------------------------------ charts

  const end = Math.max(1e-3, report.wall_s);
  let view = { min: 0, max: end }, plots = [], moving = false;
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function move(min, max, from) {
    const width = Math.min(Math.max(max - min, end / 20000), end);
    min = Math.min(Math.max(min, 0), end - width);
    view = { min, max: min + width };
    moving = true;
    for (const plot of plots) if (plot !== from || plot.scales.x.min !== view.min || plot.scales.x.max !== view.max) plot.setScale("x", view);
    moving = false;
  }
  const zoom = (factor) => { const middle = (view.min + view.max) / 2, half = ((view.max - view.min) * factor) / 2; move(middle - half, middle + half); say(); };
  const pan = (share) => { const by = (view.max - view.min) * share; move(view.min + by, view.max + by); say(); };
  const reset = () => { move(0, end); say(); };
  const say = () => { document.getElementById("said").textContent = `Showing ${clock(view.min)} to ${clock(view.max)}`; };
  let nearest = -1;
  function incident(step) {
    const found = report.incidents;
    if (!found.length) return;
    nearest = (nearest + step + found.length) % found.length;
    show(found[nearest]);
  }
  function show(found) {
    const until = known(found.resumed_s) ? found.resumed_s : Math.min(end, found.detected_s + 30), margin = Math.max(2, (until - found.at_s) * 0.6);
    move(found.at_s - margin, until + margin);
    document.getElementById("said").textContent = found.sentence;
  }
  function key(event) {
    const act = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: reset, Escape: reset, n: () => incident(1), p: () => incident(-1) }[event.key];
    if (act && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); act(); }
  }

  const SPACES = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
  const BINARY = Array.from({ length: 40 }, (_, n) => 2 ** (n + 10));
  function axes(values, size, incrs) {
    const line = { stroke: color("--soft"), grid: { stroke: color("--faint"), width: 1 }, ticks: { stroke: color("--line"), width: 1, size: 5 }, font: "11.5px system-ui, sans-serif" };
    return [{ ...line, incrs: SPACES, space: 74, size: 30, values: (u, found) => found.map(clock) }, { ...line, size: size || 56, incrs, values: (u, found) => found.map(values) }];
  }

  function marks(u, edgesOnly) {
    const ctx = u.ctx, { left, top, width, height } = u.bbox;
    ctx.save(); ctx.beginPath(); ctx.rect(left, top, width, height); ctx.clip();
    for (const found of report.incidents) {
      if (!found.stopped_training) continue;
      const a = u.valToPos(found.at_s, "x", true), b = known(found.resumed_s) ? u.valToPos(found.resumed_s, "x", true) : u.valToPos(end, "x", true);
      ctx.fillStyle = COLORS.detect; ctx.globalAlpha = 0.1; if (!edgesOnly) ctx.fillRect(a, top, Math.max(2, b - a), height);
      ctx.globalAlpha = 0.7; ctx.fillRect(a, top, devicePixelRatio, height);
    }
    ctx.restore();
  }

  function chart(title, about, columns, lines, given) {
    const box = el("div", { class: given.full ? "chart full" : "chart" }, el("h3", null, title, about ? el("span", { class: "about" }, about) : null));
    const has = columns && columns[0].length && lines.some((_, i) => columns[i + 1].some(known));
    if (!has) { box.append(el("div", { class: "none" }, given.none || "The log holds nothing to draw here.")); return { box, make: () => null }; }
    const place = el("div", { tabindex: "0", role: "img", "aria-label": `${title}. ${given.said || ""} Arrow keys pan, plus and minus zoom, 0 resets.`, onkeydown: key });
    box.append(place);
    const make = () => {
      const options = {
        width: Math.max(200, place.clientWidth), height: given.height || 190, padding: [10, 8, 0, 0],
        scales: { x: { time: false, range: (u, min, max) => [min, max] }, y: given.y || {} },
        axes: axes(given.format || short, given.size, given.incrs),
        legend: { live: true, isolate: false },
        cursor: { y: false, sync: { key: "time", scales: ["x", null] }, drag: { x: true, y: false, setScale: true }, points: { size: 6 } },
        series: [{ label: "at", value: (u, value) => (known(value) ? clock(value) : "–") },
          ...lines.map((line) => ({
            label: line.label, stroke: color(line.color) || line.color, width: line.width || 1.6, dash: line.dash, spanGaps: line.spanGaps || false,
            points: { show: line.points || undefined, size: line.points ? 7 : 4 }, paths: line.points ? () => null : undefined,
            fill: line.fill ? `color-mix(in srgb, ${color(line.color)} 12%, transparent)` : undefined,
            value: (u, value) => (known(value) ? (line.value || given.value || short)(value) : "–"),
          }))],
        hooks: { drawClear: [(u) => marks(u, false)], setScale: [(u, name) => { if (name === "x" && !moving) move(u.scales.x.min, u.scales.x.max, u); }] },
      };
      const plot = new uPlot(options, columns, place);
      plot.over.addEventListener("dblclick", reset);
      return plot;
    };
    return { box, make, place };
  }

  function joined(...tables) {
    return tables.length === 1 ? tables[0] : uPlot.join(tables, tables.map((table) => table.slice(1).map(() => 1)));
  }

  function lanes() {
    const rows = series.lanes, count = rows.length;
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
        width: Math.max(200, place.clientWidth), height: Math.round(count * height + 38), padding: [6, 8, 0, 0],
        scales: { x: { time: false, range: (u, min, max) => [min, max] }, y: { range: () => [0, count], dir: -1 } },
        axes: both, legend: { show: false }, series: [{}, { show: true, stroke: "transparent", points: { show: false } }],
        cursor: { sync: { key: "time", scales: ["x", null] }, drag: { x: true, y: false, setScale: true }, points: { show: false }, y: false },
        hooks: { drawClear: [(u) => marks(u, false)], draw: [paint, (u) => marks(u, true)], setCursor: [hover], setScale: [(u, name) => { if (name === "x" && !moving) move(u.scales.x.min, u.scales.x.max, u); }] },
      }, [[0, end], [null, null]], place);
      plot.over.addEventListener("dblclick", reset);
      plot.over.addEventListener("mouseleave", () => { document.getElementById("tip").hidden = true; });
      return plot;
    };
    return { box, make, place };
  }

  function all() {
    const s = series.steps, g = series.goodput, share = { range: (u, min, max) => [0, Math.max(1, known(max) ? max : 1)] };
    const some = (column) => column.some(known);
    const found = [];
    found.push(chart("Goodput", "tokens of the final state against R*, since the first purchase", g && [g.t, g.active, g.purchased, g.lately],
      [{ label: "active hosts", color: "--good", width: 2.2, fill: true }, { label: "purchased hosts", color: "--c2", width: 1.8 }, { label: "lately (active)", color: "--soft", width: 1, dash: [3, 3] }],
      { full: true, y: share, format: (value) => `${Math.round(value * 100)} %`, value: (value) => percent(value), height: 220, none: "No reference rate: the log holds fewer than five clean steps.", said: `Ends at ${percent(report.goodput.active)} of active hosts.` }));
    found.push(lanes());
    const lossTables = [[s.t, s.loss, s.lost_loss]], lossLines = [{ label: "training", color: "--c1" }, { label: "lost steps", color: "--bad", dash: [3, 3] }];
    if (some(series.evals.loss)) { lossTables.push([series.evals.t, series.evals.loss]); lossLines.push({ label: "held-out", color: "--c3", points: true }); }
    found.push(chart("Loss", "mean per supervised token", s.t.length ? joined(...lossTables) : null, lossLines, { value: (value) => value.toFixed(4), said: `Ends at ${number(report.final_loss, 4)}.` }));
    const R = report.goodput.reference, rate = [s.t, s.tokens_per_s], rateLines = [{ label: "tokens/s", color: "--c4" }];
    if (R && s.t.length) { rate.push(s.t.map(() => R.tokens_per_s)); rateLines.push({ label: "reference R*", color: "--soft", dash: [6, 4], width: 1.2 }); }
    found.push(chart("Throughput", "tokens per second, all ranks", rate, rateLines, { y: { range: (u, min, max) => [0, max * 1.08] }, value: (value) => number(value) }));
    found.push(chart("MFU", "model FLOPs against peak", [s.t, s.mfu], [{ label: "MFU", color: "--c2" }], { y: { range: (u, min, max) => [0, Math.max(max * 1.15, 0.01)] }, format: (value) => `${+(value * 100).toPrecision(3)} %`, value: (value) => percent(value, 1), none: "Unknown: the log holds no MFU (no peak FLOPs for this device)." }));
    found.push(chart("Memory", "peak on rank 0", [s.t, s.memory_bytes], [{ label: "memory", color: "--c3" }], { y: { range: (u, min, max) => [0, max * 1.1] }, format: (value) => (value >= 2 ** 30 ? `${+(value / 2 ** 30).toPrecision(3)} GiB` : `${+(value / 2 ** 20).toPrecision(3)} MiB`), value: bytes, size: 68, incrs: BINARY }));
    const w = series.usage, pair = (mean, other, hue) => [{ label: mean, color: hue }, { label: other, color: "--soft", dash: [3, 3], width: 1.2 }], whole = { y: { range: () => [0, 1] }, format: (value) => `${Math.round(value * 100)} %`, value: (value) => percent(value) };
    const sizes = { y: { range: (u, min, max) => [0, Math.max(max * 1.1, 2 ** 20)] }, format: (value) => bytes(value), value: bytes, size: 78, incrs: BINARY };
    if (some(w.gpu_busy)) found.push(chart("GPUs", "share of the time in which they computed", [w.t, w.gpu_busy, w.gpu_busy_least], pair("mean", "least busy", "--c4"), whole));
    if (some(w.busy)) found.push(chart("Processors", "share of hosts' processors that work", [w.t, w.busy, w.busy_most], pair("mean host", "busiest", "--c1"), whole));
    if (some(w.cpu_s)) found.push(chart("Processor time of a step", "ranks of one host, all threads", [w.t, w.cpu_s], [{ label: "mean host", color: "--c2" }], { y: { range: (u, min, max) => [0, max * 1.1] }, format: short_span, value: span }));
    if (some(w.network_bytes)) found.push(chart("Network in a step", "in and out of one host, loopback left out", [w.t, w.network_bytes, w.network_most_bytes], pair("mean host", "most", "--c3"), sizes));
    if (some(w.memory_bytes)) found.push(chart("Memory of hosts", "in use", [w.t, w.memory_bytes, w.memory_most_bytes], pair("mean host", "most", "--c2"), sizes));
    const tiers = Object.entries(series.ages), hues = { memory: "--c4", peer: "--c1", disk: "--c3", bucket: "--c2" };
    found.push(chart("Work at risk", "age of the newest restorable state, by tier", tiers.length ? joined(...tiers.map(([, saw]) => [saw.t.map(nudged(saw.t)), saw.age])) : null,
      tiers.map(([tier]) => ({ label: tier, color: hues[tier] || "--soft", spanGaps: true })), { y: { range: (u, min, max) => [0, Math.max(max * 1.08, 0.001)] }, format: short_span, value: span, none: "No checkpoint was committed.", size: 64, incrs: SPACES }));
    const cost = series.cost;
    found.push(chart("Cost", "dollars so far", cost && [cost.t, cost.usd], [{ label: "spent", color: "--c1", fill: true }], { y: { range: (u, min, max) => [0, Math.max(max * 1.08, 0.01)] }, format: (value) => `$${short(value)}`, value: usd, none: "Unknown: a host has no price in the log." }));
    return found;
  }
  // A saw-tooth has two values at one moment: the second moves by a microsecond, so that times rise.
  const nudged = (times) => (t, position) => (position && times[position - 1] === t ? t + 1e-6 : t);
  const short_span = (value) => (value >= 7200 ? `${+(value / 3600).toPrecision(3)} h` : value >= 120 ? `${+(value / 60).toPrecision(3)} min` : `${+value.toPrecision(3)} s`);

  let drawn = [];
  function draw() {
    for (const plot of plots) plot.destroy();
    const kept = view;
    plots = [];
    const made = drawn.map((one) => one.make());
    plots = made.filter(Boolean);
    move(kept.min, kept.max);
  }

  function charts() {
    drawn = all();
    const tools = el("div", { class: "tools" }, el("h2", null, "Over time"),
      [["Zoom in", "+", () => zoom(0.5)], ["Zoom out", "−", () => zoom(2)], ["Earlier", "←", () => pan(-0.25)], ["Later", "→", () => pan(0.25)], ["Whole run", "reset", reset]].map(([name, text, act]) =>
        el("button", { type: "button", "aria-label": name, title: name, onclick: act }, text)),
      el("span", { class: "hint" }, el("kbd", null, "←"), " ", el("kbd", null, "→"), " pan  ", el("kbd", null, "+"), " ", el("kbd", null, "−"), " zoom  ", el("kbd", null, "0"), " reset  ", el("kbd", null, "n"), " ", el("kbd", null, "p"), " incidents"));
    return el("section", { class: "card", id: "charts", onkeydown: (event) => { if (event.target.closest("button")) key(event); } }, tools, el("div", { class: "grid" }, drawn.map((one) => one.box)));
  }

  // ------------------------------------------------------------ incidents and tables

  function incidents() {
    const section = el("section", { class: "card", id: "incidents" }, el("h2", null, "Incidents"));
    if (!report.incidents.length) { section.append(el("p", { class: "sub" }, "Nothing went wrong.")); return section; }
    const list = el("div", report.incidents.length > 8 ? { class: "tall", tabindex: "0" } : null);
    section.append(list);
    for (const found of report.incidents) {
      const total = Object.values(found.host_s).reduce((sum, value) => sum + value, 0);
      list.append(el("div", { class: found.stopped_training ? "incident" : "incident quiet" },
        el("div", { class: "line" }, el("b", null, label(found.kind)), el("span", null, `at ${clock(found.at_s)}`), known(found.lost_s) ? el("span", null, `lost ${span(found.lost_s)}`) : null,
          el("button", { type: "button", onclick: () => { show(found); document.getElementById("charts").scrollIntoView(); } }, "Show")),
        el("p", null, found.sentence),
        total > 0 ? el("div", { class: "costs", role: "img", "aria-label": Object.entries(found.host_s).map(([name, value]) => `${label(name)} ${number(value, 1)} host-seconds`).join(", ") },
          Object.entries(found.host_s).map(([name, value]) => el("span", { style: { flex: `${value / total} 1 0`, background: COLORS[name] }, title: `${label(name)}: ${number(value, 1)} host-s` }))) : null));
    }
    const kinds = Object.entries(report.incident_kinds);
    if (kinds.length) section.append(table(["kind", "count", "recovered", "lost p50", "lost p95", "noticed p50", "noticed p95", "host-s"],
      kinds.map(([name, k]) => [label(name), number(k.count), number(k.recovered), span(k.lost_s_p50), span(k.lost_s_p95), span(k.detect_s_p50), span(k.detect_s_p95), number(k.host_s, 1)])));
    return section;
  }

  function table(names, rows) {
    const cell = (tag, value, position) => el(tag, position ? { class: "n" } : null, value);
    return el("div", { class: rows.length > 12 ? "wide tall" : "wide", tabindex: rows.length > 12 ? "0" : null }, el("table", null, el("thead", null, el("tr", null, names.map((name, i) => cell("th", name, i)))),
      el("tbody", null, rows.map((row) => el("tr", null, row.map((value, i) => cell("td", value, i)))))));
  }

  function tables() {
    const hosts = Object.entries(report.host_time.hosts), sections = [];
    if (hosts.length) sections.push(el("section", { class: "card" }, el("h2", null, "Hosts"), table(["host", "role", "ranks", "held", "productive", "$/h"],
      hosts.map(([name, host]) => [name, host.role, number(host.gpus), span(host.held_s), percent((host.categories_s.productive || 0) / host.held_s, 1), known(host.usd_per_hour) ? usd(host.usd_per_hour) : UNKNOWN]))));
    const tiers = Object.entries(report.checkpoint_exposure);
    if (tiers.length) sections.push(el("section", { class: "card" }, el("h2", null, "Age of the newest restorable state"), table(["tier", "versions", "newest step", "mean", "greatest", "at the end"],
      tiers.map(([tier, age]) => [tier, number(age.versions), number(age.newest_step), span(age.mean_age_s), span(age.greatest_age_s), span(age.last_age_s)]))));
    const step = report.step_budget, lever = step && step.levers[0], ms = (value) => (known(value) ? number(value * 1000, 1) : "");
    if (step) sections.push(el("section", { class: "card", id: "step" }, el("h2", null, `Where a step of ${span(step.step_s)} goes (rank 0, mean of ${number(step.steps)})`),
      table(["part", "ms", "share", ...(known(step.planned_step_s) ? ["planned ms"] : [])], Object.entries(step.parts_s).map(([part, value]) =>
        [label(part), ms(value), percent(value / step.step_s, 1), ...(known(step.planned_step_s) ? [ms(step.planned_s[part])] : [])])),
      lever ? el("p", null, `Next: ${label(lever.part)}, worth ${percent(lever.worth_share, 0)} of a step at most${known(lever.usd_per_day) ? `, ${usd(lever.usd_per_day)} a day` : ""}: ${lever.advice}.`) : null));
    if (report.evals.length) sections.push(el("section", { class: "card" }, el("h2", null, "Evaluations"), table(["step", "held-out loss", "execution accuracy", "query match", "questions"],
      report.evals.map((found) => [number(found.step), number(found.loss, 4), percent(found.execution_accuracy, 1), percent(found.query_match, 1), number(found.questions)]))));
    if (report.attempts.length) sections.push(el("section", { class: "card" }, el("h2", null, "Attempts"), table(["attempt", "from", "ranks", "hosts", "steps", "kept", "state from"],
      report.attempts.map((found) => [number(found.attempt), clock(found.start_s), number(found.world_size), Object.keys(found.hosts).length, number(found.steps), number(found.steps_kept), found.tier || "–"]))));
    if (report.model) sections.push(el("section", { class: "card" }, el("h2", null, "Model"), table(["", ""],
      Object.entries(report.model).map(([name, value]) => [label(name), typeof value === "number" ? (Math.abs(value) >= 1e9 ? short(value) : number(value, Number.isInteger(value) ? 0 : 4)) : String(value)]))));
    return sections.length ? [el("div", { class: "pairs" }, sections)] : [];
  }

  function log() {
    const lines = [...report.log.problems, ...report.notes], files = Object.entries(report.log.files);
    const torn = files.filter(([, found]) => found.torn_bytes).map(([name]) => name);
    const chain = report.log.verified ? el("p", { class: "good" }, `All ${files.length} hash chains hold.`) : el("p", { class: "bad" }, files.length ? "The log was changed after it was written." : "The log's hash chains were not checked.");
    const reference = report.goodput.reference;
    if (reference) lines.push(`R* is ${number(reference.tokens_per_s, 1)} tokens/s: ${reference.source}${reference.steps ? `, ${reference.steps} steps` : ""}${known(reference.spread) ? `, spread ${percent(reference.spread)}` : ""}.`);
    if (torn.length) lines.push(`Torn last line left out: ${torn.join(", ")}.`);
    return el("section", { class: "card" }, el("h2", null, "The log behind this page"), chain, lines.length ? el("ul", { class: "notes" }, lines.map((line) => el("li", null, line))) : null);
  }

  // ------------------------------------------------------------ theme and start

  const wanted = matchMedia("(prefers-color-scheme: dark)");
  function stored(value) { try { return value === undefined ? localStorage.getItem("muster-theme") : localStorage.setItem("muster-theme", value); } catch { return null; } }
  function theme(name) {
    root.dataset.theme = name;
    const button = document.getElementById("theme");
    button.textContent = name === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${name === "dark" ? "light" : "dark"} theme`);
    draw();
  }
  function flip() { const name = root.dataset.theme === "dark" ? "light" : "dark"; stored(name); theme(name); }

  head();
  document.getElementById("main").append(...[figures(), charts(), categories(), incidents(), ...tables(), log()].filter(Boolean));
  document.getElementById("foot").append(`Muster ${report.version || ""} · run ${report.run_id} · newest event ${report.newest_event || UNKNOWN} · charts by uPlot (MIT). Definitions: docs/goodput.md.`);
  theme(stored() || (wanted.matches ? "dark" : "light"));
  wanted.addEventListener("change", (event) => { if (!stored()) theme(event.matches ? "dark" : "light"); });
  let timer = null;
  new ResizeObserver(() => {
    clearTimeout(timer);
    timer = setTimeout(() => drawn.forEach((one) => { const plot = plots.find((found) => found.root.parentNode === one.place); if (plot && one.place.clientWidth) plot.setSize({ width: one.place.clientWidth, height: plot.height }); }), 60);
  }).observe(document.getElementById("main"));
  root.dataset.ready = "yes";
})();
