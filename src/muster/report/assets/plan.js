"use strict";
(() => {
  const { plan, others, limits } = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement, chosen = plan.chosen;
  const known = (value) => value !== null && value !== undefined;

  // ------------------------------------------------------------ words

  const UNKNOWN = "unknown", AGES_H = 24 * 3650;
  const number = (value, digits = 0) => (known(value) ? value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }) : UNKNOWN);
  const percent = (value, digits = 1) => (known(value) ? `${(value * 100).toFixed(digits)} %` : UNKNOWN);
  const usd = (value) => (known(value) ? (value >= 100 ? `$${number(value)}` : value >= 0.1 ? `$${number(value, 2)}` : `$${+value.toPrecision(2)}`) : UNKNOWN);
  const gigabytes = (value) => (known(value) ? `${number(value / 1e9, value >= 1e10 ? 0 : 1)} GB` : UNKNOWN);
  function time(hours) {
    if (!known(hours)) return UNKNOWN;
    if (hours > AGES_H) return "over 10 years";
    if (hours < 1 / 60) return `${number(hours * 3600)} s`;
    if (hours < 1) return `${number(hours * 60)} min`;
    return hours < 72 ? `${number(hours, 1)} h` : `${number(hours / 24, 1)} days`;
  }
  const seconds = (value) => `${+value.toPrecision(3)} s`;

  function el(tag, given, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(given || {})) {
      if (key === "style") Object.assign(node.style, value);
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (known(value) && value !== false) node.setAttribute(key, value === true ? "" : value);
    }
    for (const child of children.flat()) if (known(child) && child !== false) node.append(child);
    return node;
  }

  // ------------------------------------------------------------ head and figures

  function head() {
    document.title = `${plan.job} · Muster plan`;
    document.getElementById("head").append(
      el("div", null,
        el("h1", null, plan.job, el("span", { class: "badge good" }, "plan")),
        el("div", { class: "sub" }, [chosen.title, layout(chosen), `made ${plan.made.replace("T", " ").slice(0, 16)} UTC`].join("  ·  ")),
        el("div", { class: "sub" }, plan.run_file)),
      el("button", { id: "theme", type: "button", onclick: flip }, "Dark"));
  }

  function layout(each) {
    const axes = Object.entries(each.layout).filter(([, size]) => size > 1).map(([name, size]) => `${name} ${size}`);
    return `${axes.join(" x ") || "one GPU"}, micro-batch ${each.micro_batch_size}, checkpointing ${each.activation_checkpointing}`;
  }

  function figure(name, value, more, first) {
    return el("div", { class: first ? "figure first" : "figure" }, el("div", { class: "name" }, name), el("div", { class: value === UNKNOWN ? "value unknown" : "value" }, value), more ? el("div", { class: "more" }, more) : null);
  }

  function figures() {
    return el("section", { class: "figures", "aria-label": "Headline figures" },
      figure("Cost", usd(chosen.usd.p50), `p90 ${usd(chosen.usd.p90)}`, true),
      figure("Time", time(chosen.hours.p50), `p90 ${time(chosen.hours.p90)}, queueing not counted`),
      known(chosen.chance_in_time) ? figure("In time", percent(chosen.chance_in_time, 0), time(limits.max_hours)) : null,
      known(chosen.chance_within_max_usd) ? figure("Within the budget", percent(chosen.chance_within_max_usd, 0), usd(limits.max_usd)) : null,
      figure("Step", seconds(chosen.step_s), known(chosen.mfu) ? `MFU ${percent(chosen.mfu)}` : "no MFU: peak unknown"),
      figure("Tokens/s", number(chosen.tokens_per_s), `${chosen.gpus} GPUs`),
      figure("A million tokens", usd(chosen.usd_per_million_tokens), `${usd(chosen.usd_per_step)} a step, ${usd(chosen.usd_per_hour)} an hour`),
      figure("Memory a GPU", gigabytes(chosen.memory_bytes_per_gpu), `of ${gigabytes(chosen.gpu_memory_bytes)}, at its peak (${chosen.memory_peak_moment})`),
      figure("Goodput", percent(chosen.goodput), `${+chosen.interruptions_per_day.toPrecision(2)} interruptions a day expected`));
  }

  // ------------------------------------------------------------ cost against finish time

  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const points = plan.frontier.filter((each) => known(each.usd.p50));
  const around = others.filter((each) => known(each.usd.p50));
  const kinds = [...new Set([...points, ...around].map((each) => each.accelerator))].sort();
  const HUES = ["#2fa36f", "#3d6fe0", "#d1660b", "#8250df", "#b82e72", "#128577", "#b0842b", "#7b5a4e"];
  const hue = (each) => HUES[kinds.indexOf(each.accelerator) % HUES.length];
  let plot = null, at = Math.max(0, points.findIndex((each) => each.title === chosen.title));

  // Marks of a logarithmic axis: as many round values as have room.
  const MOMENTS = [...[1, 2, 5, 10, 20, 30].map((minutes) => minutes / 60), 1, 2, 4, 8, 12, 24, 48, ...[3, 5, 7, 10, 20, 50, 100, 200, 500, 1000].map((days) => days * 24)];
  const AMOUNTS = Array.from({ length: 12 }, (_, n) => [1, 2, 5].map((digit) => digit * 10 ** (n - 2))).flat();
  function spaced(values, place, room) {
    const kept = [];
    for (const value of values) if (!kept.length || Math.abs(place(value) - place(kept[kept.length - 1])) >= room) kept.push(value);
    return kept;
  }

  function bounds(values, extra) {
    const all = [...values, ...(known(extra) && extra > 0 ? [extra] : [])];
    return [Math.min(...all) / 1.25, Math.max(...all) * 1.25];
  }

  function chart() {
    const section = el("section", { class: "card", id: "charts" }, el("h2", null, "Cost against finish time"));
    if (!points.length) { section.append(el("div", { class: "chart" }, el("div", { class: "none" }, "No offer that fits has a known price."))); return section; }
    const place = el("div", { tabindex: "0", role: "img", onkeydown: key, "aria-label": `Cost against finish time of ${points.length} plans, from ${points[0].title} to ${points[points.length - 1].title}. Arrow keys go from plan to plan; the table below holds the figures.` });
    section.append(
      el("p", { class: "sub" }, "Each ring is a plan nothing beats in both; the bars end at the 90th percentile. Dots: what else fits, at its best setting. Both axes are logarithmic."),
      el("div", { class: "chart full" }, place),
      el("div", { class: "legend" }, kinds.map((name) => el("span", null, el("span", { class: "swatch", style: { background: HUES[kinds.indexOf(name) % HUES.length] } }), name))));
    return section;
  }

  function paint(u) {
    const ctx = u.ctx, { left, top, width, height } = u.bbox, ratio = devicePixelRatio;
    const x = (value) => u.valToPos(value, "x", true), y = (value) => u.valToPos(value, "y", true);
    const dot = (each, radius) => { ctx.beginPath(); ctx.arc(x(each.hours.p50), y(each.usd.p50), radius * ratio, 0, 2 * Math.PI); };
    ctx.save(); ctx.beginPath(); ctx.rect(left, top, width, height); ctx.clip();
    ctx.fillStyle = color("--bad"); ctx.globalAlpha = 0.1;
    if (known(limits.max_hours) && limits.max_hours > 0) ctx.fillRect(x(limits.max_hours), top, left + width - x(limits.max_hours), height);
    if (known(limits.max_usd) && limits.max_usd > 0) ctx.fillRect(left, top, width, y(limits.max_usd) - top);
    ctx.globalAlpha = 0.45;
    for (const each of around) { ctx.fillStyle = hue(each); dot(each, 2.6); ctx.fill(); }
    ctx.globalAlpha = 1; ctx.lineWidth = 1.4 * ratio; ctx.strokeStyle = color("--soft");
    ctx.beginPath(); points.forEach((each, i) => ctx[i ? "lineTo" : "moveTo"](x(each.hours.p50), y(each.usd.p50))); ctx.stroke();
    points.forEach((each, i) => {
      ctx.strokeStyle = ctx.fillStyle = hue(each); ctx.lineWidth = 1.6 * ratio;
      ctx.globalAlpha = 0.7; ctx.beginPath();
      ctx.moveTo(x(each.hours.p50), y(each.usd.p50)); ctx.lineTo(x(each.hours.p90), y(each.usd.p50));
      ctx.moveTo(x(each.hours.p50), y(each.usd.p50)); ctx.lineTo(x(each.hours.p50), y(each.usd.p90)); ctx.stroke();
      ctx.globalAlpha = 1; dot(each, i === at ? 8 : 5.5); ctx.fillStyle = color("--card"); ctx.fill(); ctx.lineWidth = (i === at ? 3.4 : 2.4) * ratio; ctx.stroke();
      if (each.title === chosen.title) { dot(each, 3); ctx.fillStyle = hue(each); ctx.fill(); }
    });
    ctx.restore();
  }

  const words = (each) => `${each.title}: ${usd(each.usd.p50)} (p90 ${usd(each.usd.p90)}), ${time(each.hours.p50)} (p90 ${time(each.hours.p90)}), ${each.gpus} GPUs`;

  function point(u) {
    const tip = document.getElementById("tip"), { left, top } = u.cursor;
    let nearest = null, least = 24;
    if (left >= 0 && u.over.matches(":hover")) for (const each of [...points, ...around]) {
      const away = Math.hypot(u.valToPos(each.hours.p50, "x") - left, u.valToPos(each.usd.p50, "y") - top);
      if (away < least - 1e-9) { least = away; nearest = each; }
    }
    tip.hidden = !nearest;
    if (!nearest) return;
    tip.replaceChildren(el("b", null, nearest.title), words(nearest).slice(nearest.title.length + 2));
    const place = u.over.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(place.left + left + 14, innerWidth - tip.offsetWidth - 12))}px`;
    tip.style.top = `${Math.max(8, place.top + top + 16 + tip.offsetHeight > innerHeight ? place.top + top - tip.offsetHeight - 12 : place.top + top + 16)}px`;
  }

  function choose(position) {
    at = (position + points.length) % points.length;
    document.getElementById("said").textContent = words(points[at]);
    document.querySelectorAll("#frontier tbody tr").forEach((row, i) => row.classList.toggle("at", row.dataset.title === points[at].title));
    if (plot) plot.redraw(false);
  }
  function key(event) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (by && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); choose(at + by); }
  }

  function draw() {
    if (plot) plot.destroy();
    plot = null;
    const place = document.querySelector("#charts [role=img]");
    if (!place) return;
    const x = bounds([...points, ...around].flatMap((each) => [each.hours.p50]).concat(points.map((each) => each.hours.p90)), limits.max_hours);
    const y = bounds([...points, ...around].flatMap((each) => [each.usd.p50]).concat(points.map((each) => each.usd.p90)), limits.max_usd);
    const line = { stroke: color("--soft"), grid: { stroke: color("--faint"), width: 1 }, ticks: { stroke: color("--line"), width: 1, size: 5 }, font: "11.5px system-ui, sans-serif" };
    const axis = (all, space, say) => ({ ...line, space, filter: (u, found) => found, values: (u, found) => found.map(say),
      splits: (u, side) => { const key = side ? "y" : "x", { min, max } = u.scales[key]; return spaced(all.filter((value) => value >= min && value <= max), (value) => u.valToPos(value, key), space); } });
    plot = new uPlot({
      width: Math.max(200, place.clientWidth), height: 320, padding: [10, 12, 0, 0],
      scales: { x: { time: false, distr: 3, range: () => x }, y: { distr: 3, range: () => y } },
      axes: [{ ...axis(MOMENTS, 62, time), size: 30 }, { ...axis(AMOUNTS, 26, usd), size: 66 }],
      legend: { show: false }, series: [{}, { show: true, stroke: "transparent", points: { show: false } }],
      cursor: { drag: { x: false, y: false }, points: { show: false } },
      hooks: { draw: [paint], setCursor: [point] },
    }, [x, [null, null]], place);
    plot.over.addEventListener("mouseleave", () => { document.getElementById("tip").hidden = true; });
  }

  // ------------------------------------------------------------ tables

  function table(names, rows, given) {
    const cell = (tag, value, position) => el(tag, position ? { class: "n" } : null, value);
    return el("div", { class: rows.length > 14 ? "wide tall" : "wide", tabindex: rows.length > 14 ? "0" : null }, el("table", given, el("thead", null, el("tr", null, names.map((name, i) => cell("th", name, i)))),
      el("tbody", null, rows.map((row) => el("tr", { "data-title": row[0] }, row.map((value, i) => cell("td", value, i)))))));
  }

  function frontier() {
    return el("section", { class: "card", id: "frontier" }, el("h2", null, "Plans that nothing beats in both cost and time"),
      table(["plan", "GPUs", "step", "MFU", "time p50", "p90", "cost p50", "p90", "a million tokens"],
        plan.frontier.map((each) => [each.title, number(each.gpus), seconds(each.step_s), percent(each.mfu), time(each.hours.p50), time(each.hours.p90), usd(each.usd.p50), usd(each.usd.p90), usd(each.usd_per_million_tokens)])));
  }

  function stack(title, parts, say) {
    const rows = Object.entries(parts).filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]), total = rows.reduce((sum, [, value]) => sum + value, 0);
    if (!rows.length) return null;
    return el("section", { class: "card" }, el("h2", null, title),
      el("div", { class: "stack", role: "img", "aria-label": rows.map(([name, value]) => `${name} ${say(value)}`).join(", ") },
        rows.map(([name, value], i) => el("span", { style: { flex: `${value / total} 1 0`, background: HUES[i % HUES.length] }, title: `${name}: ${say(value)}` }))),
      el("div", { class: "wide" }, el("table", null, el("tbody", null, rows.map(([name, value], i) => el("tr", null, el("td", null, el("span", { class: "swatch", style: { background: HUES[i % HUES.length] } }), name), el("td", { class: "n" }, say(value)), el("td", { class: "n" }, percent(value / total))))))));
  }

  const list = (title, lines) => (lines.length ? el("section", { class: "card" }, el("h2", null, title), el("ul", { class: "notes" }, lines.map((line) => el("li", null, line)))) : null);

  function rejected() {
    return plan.rejected.length ? el("section", { class: "card", id: "incidents" }, el("h2", null, "Not taken"), table(["machine", "mode", "place", "reason"], plan.rejected.map((each) => [each.machine, each.mode, each.location, each.reason]), { class: "reasons" })) : null;
  }

  function assumed() {
    const price = chosen.price;
    const lines = [...plan.assumptions, ...chosen.modelled, ...chosen.rules.map((rule) => `rule of this mode: ${rule}`)];
    if (price) lines.push(`price: $${price.usd_per_gpu_hour} a GPU-hour (${price.reliability}, ${price.date}: ${price.source})`);
    return list("What this rests on", lines);
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
  document.getElementById("main").append(...[figures(), chart(), frontier(), list("Why", plan.why),
    el("div", { class: "pairs", style: { marginBottom: "18px" } }, stack(`Memory of a GPU at its peak: ${gigabytes(chosen.memory_bytes_per_gpu)}`, chosen.memory_bytes_by_item, gigabytes), stack(`A step of ${seconds(chosen.step_s)}`, chosen.step_s_by_item, seconds)),
    rejected(), assumed()].filter(Boolean));
  document.getElementById("foot").append("Modelled, before anything was bought: what is measured and what is assumed stands in docs/explanation/plan.md. Charts by uPlot (MIT).");
  theme(stored() || (wanted.matches ? "dark" : "light"));
  if (points.length) choose(at);
  wanted.addEventListener("change", (event) => { if (!stored()) theme(event.matches ? "dark" : "light"); });
  let timer = null;
  new ResizeObserver(() => {
    clearTimeout(timer);
    timer = setTimeout(() => { const place = document.querySelector("#charts [role=img]"); if (plot && place && place.clientWidth) plot.setSize({ width: place.clientWidth, height: plot.height }); }, 60);
  }).observe(document.getElementById("main"));
  root.dataset.ready = "yes";
})();
