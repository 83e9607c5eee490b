/* All rehearsals of a study, above the page of one of them: how goodput was spread, where the time went, what each choice is worth. */
(() => {
  const { COLORS, known, number, percent, usd, span, label, el, table } = muster;
  const { study, spread } = JSON.parse(document.getElementById("data").textContent);
  const world = study.scenario, points = (value) => `${value >= 0 ? "+" : "−"}${Math.abs(value * 100).toFixed(2)}`;

  function about() {
    const rate = world.trace === null ? `${+world.failures_per_day.toPrecision(3)} failures a day` : `trace ${world.trace}`;
    const saves = known(world.checkpoint_every_s) ? `every ${span(world.checkpoint_every_s)}` : "never";
    return [`${world.hosts} hosts (${world.gpus} GPUs), ${world.spares} spare${world.spares === 1 ? "" : "s"}, ${+world.hours.toPrecision(3)} h, ${rate}, policy ${world.policy}, saves ${saves}, stage times ${study.profile.name}`,
      `a step takes ${span(world.step_s)} (${world.step_source})${known(world.usd_per_host_hour) ? `; ${usd(world.usd_per_host_hour)} a host-hour (${world.price_source}), ${usd(study.usd)} a rehearsal` : ""}`];
  }

  // As many bars as the square root of the rehearsals, at least 5: each says how many ended there.
  function histogram(title, values) {
    const low = Math.min(...values), high = Math.max(...values), bars = Math.max(5, Math.min(30, Math.ceil(Math.sqrt(values.length)))), width = (high - low) / bars || 1;
    const counts = Array(bars).fill(0);
    for (const value of values) counts[Math.min(bars - 1, Math.floor((value - low) / width))] += 1;
    const most = Math.max(...counts), range = (i) => `${percent(low + i * width)} to ${percent(Math.min(high, low + (i + 1) * width))}`;
    return el("div", { class: "chart" }, el("h3", null, title, el("span", { class: "about" }, `${values.length} rehearsals, each with failures of its own`)),
      el("div", { class: "histogram", role: "img", "aria-label": counts.map((count, i) => `${range(i)}: ${count}`).join(", ") },
        counts.map((count, i) => el("span", { style: { height: `${(count / most) * 100}%` }, title: `${range(i)}: ${count} of ${values.length}` }))),
      el("div", { class: "ends" }, el("span", null, percent(low)), el("span", null, percent(high))));
  }

  function goodput() {
    const row = (name, found) => [name, ...["mean", "sd", "p5", "p50", "p95"].map((key) => percent(found[key]))];
    return table(["goodput", "mean", "sd", "p5", "p50", "p95"], [row("of active hosts", study.goodput_active), row("of purchased hosts", study.goodput_purchased)]);
  }

  function went() {
    const spent = Object.entries(study.categories).filter(([, found]) => found.share > 5e-6);
    return el("section", { class: "card" }, el("h2", null, "Where host time went, in the mean"),
      el("div", { class: "stack", role: "img", "aria-label": spent.map(([name, found]) => `${label(name)} ${percent(found.share)}`).join(", ") },
        spent.map(([name, found]) => el("span", { style: { flex: `${found.share} 1 0`, background: COLORS[name] }, title: `${label(name)}: ${percent(found.share)}` }))),
      table(["went to", "share", "host-hours"], spent.map(([name, found]) => [label(name), percent(found.share, 3), number(found.host_s / 3600, 1)])));
  }

  function lost() {
    const rows = Object.entries(study.lost_s);
    return rows.length ? el("section", { class: "card" }, el("h2", null, "Lost per interruption"), table(["kind", "count", "p50", "p95"], rows.map(([kind, found]) => [label(kind), number(found.count), span(found.p50), span(found.p95)]))) : null;
  }

  function choices(title, name, rows, best) {
    if (!rows.length) return null;
    const called = (row) => el("div", null, row.name === best ? el("b", null, `${row.name}: most of what is paid for`) : row.name, el("div", { class: "sub" }, row.about));
    return el("section", { class: "card choices" }, el("h2", null, title), table([name, "active", "purchased", "points", "±"],
      rows.map((row) => [called(row), percent(row.active), percent(row.purchased), points(row.change_active), number(row.error * 100, 2)])));
  }

  const sections = [lost(),
    choices("Without one thing", "without", study.contributions, null), choices("Spare hosts", "spares", study.spares, study.best.spares),
    choices("Time between saves", "saves every", study.intervals, study.best.interval), choices("Policies", "policy", study.policies, study.best.policy)].filter(Boolean);
  document.getElementById("main").prepend(
    el("section", { class: "card", id: "study" }, el("h2", null, `${number(study.seeds)} rehearsal${study.seeds === 1 ? "" : "s"}`), about().map((line) => el("p", { class: "sub" }, line)),
      el("div", { class: "grid" }, histogram("Goodput of active hosts", spread.active), histogram("Goodput of purchased hosts", spread.purchased)), goodput(),
      study.gave_up ? el("p", null, `The run ended by its own decision ${study.gave_up.toFixed(2)} times a rehearsal, and was started again.`) : null,
      el("p", { class: "sub" }, study.note)),
    went(), el("div", { class: "pairs" }, sections),
    el("h2", { class: "one" }, "One of them: the one whose goodput is the median"));
})();
