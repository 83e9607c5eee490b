"use strict";
(() => {
  const { COLORS, UNKNOWN, known, number, percent, usd, span, clock, short, label, el, table } = muster;
  const data = JSON.parse(document.getElementById("data").textContent);
  const report = data.report, charts = muster.charts(report, data.series, null, Boolean(data.study)), at = (t) => clock(charts.held(t));
  const root = document.documentElement, free = report.cost.usd === 0;

  // ------------------------------------------------------------ head and figures

  function head() {
    const outcome = data.study ? "rehearsal" : report.outcome || "not finished";
    const tone = { succeeded: "good", failed: "bad" }[outcome] || "warn";
    const facts = [report.name && report.name !== report.run_id ? report.run_id : null, report.backend, report.started && !data.study && `started ${report.started.replace("T", " ").slice(0, 19)} UTC`, span(report.wall_s)];
    document.getElementById("head").append(
      el("div", null,
        el("h1", null, report.name || report.run_id, el("span", { class: `badge ${tone}` }, outcome)),
        el("div", { class: "sub" }, facts.filter(Boolean).join("  ·  ")),
        report.reason && outcome !== "succeeded" ? el("div", { class: "sub" }, report.reason) : null),
      el("button", { id: "theme", type: "button" }, "Dark"));
  }

  function figure(name, value, more, first) {
    const shown = value === UNKNOWN ? el("div", { class: "value unknown" }, UNKNOWN) : el("div", { class: "value" }, value);
    return el("div", { class: first ? "figure first" : "figure" }, el("div", { class: "name" }, name), shown, more ? el("div", { class: "more" }, more) : null);
  }

  // What was learned, how long it took, what it cost; then how well the machines were used.
  function figures() {
    const g = report.goodput, all = report.incident_kinds.all, cost = report.cost, first = report.evals[0];
    const rate = g.reference && `R* ${number(g.reference.tokens_per_s)} tokens/s on ${g.reference.world_size} ranks`;
    const before = report.evals.length > 1 && first && known(first.loss) ? `from ${number(first.loss, 4)} at step ${number(first.step)}` : null;
    const accuracy = [known(report.execution_accuracy_before) ? `from ${percent(report.execution_accuracy_before, 1)}` : null, known(report.baseline_accuracy) ? `majority baseline ${percent(report.baseline_accuracy, 1)}` : null].filter(Boolean).join(", ");
    const tokens = report.tokens >= 1e10 ? `${number(report.tokens / 1e9, 2)} B` : number(report.tokens);
    const paused = data.series.pauses.reduce((sum, [from, to]) => sum + to - from, 0);
    const waits = [report.host_time.queue_s > 0 ? `${span(report.host_time.queue_s)} in the queue` : null, paused > 0 ? `${span(paused)} with nothing held` : null].filter(Boolean);
    const price = known(cost.usd) ? `${usd(cost.usd_per_million_tokens)} per million tokens` : `no price for ${cost.hosts_without_price.length} hosts`;
    return el("section", { class: "figures", "aria-label": "Headline figures" },
      known(report.heldout_loss) ? figure("Held-out loss", number(report.heldout_loss, 4), before, true) : null,
      known(report.final_loss) || !report.steps ? figure("Training loss", number(report.final_loss, 4), known(report.final_step) ? `at step ${number(report.final_step)}` : null, !known(report.heldout_loss)) : null,
      known(report.execution_accuracy) ? figure("Execution accuracy", percent(report.execution_accuracy, 1), accuracy, true) : null,
      figure("Time", span(report.wall_s), waits.length ? `of it ${waits.join(", ")}` : null),
      free ? null : figure("Cost", usd(cost.usd), price),
      figure("Tokens", tokens, `${number(report.steps)} steps, each counted once`),
      figure("Tokens/s", number(report.tokens_per_s), known(report.speed.step_s) ? `step ${span(report.speed.step_s)}` : null),
      (free || data.study) && !known(report.mfu) ? null : figure("MFU", percent(report.mfu, 1), known(report.mfu) ? "median of clean steps" : "no peak FLOPs in the log"),
      figure("Interruptions", number(report.interruptions), all && known(all.lost_s_p50) ? `lost p50 ${span(all.lost_s_p50)}, p95 ${span(all.lost_s_p95)}` : null),
      ...(g.active === g.purchased ? [figure("Goodput", percent(g.active), rate)]
        : [figure("Goodput, active hosts", percent(g.active), rate), figure("Goodput, purchased hosts", percent(g.purchased), "spares in the denominator")]),
      figure("Host-time productive", percent(g.time), `of ${span(report.host_time.purchased_host_s)} host-time`),
      known(g.fault_tolerance_overhead) ? figure("Fault-tolerance overhead", percent(g.fault_tolerance_overhead), "of a step, against R* measured without it") : null,
      known(cost.usd_per_goodput_point) && !free ? figure("One more goodput point", usd(cost.usd_per_goodput_point), "would have saved") : null);
  }

  function next() {
    return data.next && data.next.length ? el("section", { class: "card", id: "next" }, el("h2", null, "What to do next"), el("ul", { class: "notes" }, data.next.map((line) => el("li", null, line)))) : null;
  }

  // ------------------------------------------------------------ where the time went


  function categories() {
    const spent = Object.entries(report.categories).filter(([, found]) => found.host_ns > 0);
    if (!spent.length) return null;
    const bar = el("div", { class: "stack", role: "img", "aria-label": spent.map(([name, found]) => `${label(name)} ${percent(found.share)}`).join(", ") },
      spent.map(([name, found]) => el("span", { style: { flex: `${found.share} 1 0`, background: COLORS[name] }, title: `${label(name)}: ${percent(found.share)}` })));
    const rows = spent.map(([name, found]) => el("tr", null,
      el("td", null, el("span", { class: "swatch", style: { background: COLORS[name] } }), label(name)),
      el("td", { class: "n" }, number(found.host_s, 1)), el("td", { class: "n" }, percent(found.share)), free ? null : el("td", { class: "n" }, usd(found.usd)),
      el("td", { class: "soft meaning" }, found.meaning)));
    const queue = report.host_time.queue_s > 0 ? `, after ${span(report.host_time.queue_s)} in the queue` : "";
    return el("section", { class: "card", id: "categories" }, el("h2", null, `Where ${number(report.host_time.purchased_host_s, 1)} host-seconds went${queue}`), bar,
      el("div", { class: "wide" }, el("table", null,
        el("thead", null, el("tr", null, el("th", null, "went to"), el("th", { class: "n" }, "host-s"), el("th", { class: "n" }, "share"), free ? null : el("th", { class: "n" }, "cost"), el("th", { class: "meaning" }, "meaning"))),
        el("tbody", null, rows))));
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
        el("div", { class: "line" }, el("b", null, label(found.kind)), el("span", null, `at ${at(found.at_s)}`), known(found.lost_s) ? el("span", null, `lost ${span(found.lost_s)}`) : null,
          el("button", { type: "button", onclick: () => { charts.show(found); document.getElementById("charts").scrollIntoView(); } }, "Show")),
        el("p", null, found.sentence),
        total > 0 ? el("div", { class: "costs", role: "img", "aria-label": Object.entries(found.host_s).map(([name, value]) => `${label(name)} ${number(value, 1)} host-seconds`).join(", ") },
          Object.entries(found.host_s).map(([name, value]) => el("span", { style: { flex: `${value / total} 1 0`, background: COLORS[name] }, title: `${label(name)}: ${number(value, 1)} host-s` }))) : null));
    }
    const kinds = Object.entries(report.incident_kinds);
    if (kinds.length) section.append(table(["kind", "count", "recovered", "lost p50", "lost p95", "noticed p50", "noticed p95", "host-s"],
      kinds.map(([name, k]) => [label(name), number(k.count), number(k.recovered), span(k.lost_s_p50), span(k.lost_s_p95), span(k.detect_s_p50), span(k.detect_s_p95), number(k.host_s, 1)])));
    return section;
  }

  // Without columns in which nothing is known.
  function told_alone(names, rows) {
    const known = names.map((_, i) => rows.some((row) => row[i] !== UNKNOWN));
    return table(names.filter((_, i) => known[i]), rows.map((row) => row.filter((_, i) => known[i])));
  }

  function tables() {
    const hosts = Object.entries(report.host_time.hosts), sections = [];
    if (hosts.length) sections.push(el("section", { class: "card" }, el("h2", null, "Hosts"), table(["host", "role", "ranks", "held", "productive", ...(free ? [] : ["$/h"])],
      hosts.map(([name, host]) => [name, host.role, number(host.gpus), span(host.held_s), percent((host.categories_s.productive || 0) / host.held_s, 1), ...(free ? [] : [usd(host.usd_per_hour)])]))));
    const tiers = Object.entries(report.checkpoint_exposure);
    if (tiers.length) sections.push(el("section", { class: "card" }, el("h2", null, "Age of the newest restorable state"), table(["tier", "versions", "newest step", "mean", "greatest", "at the end"],
      tiers.map(([tier, age]) => [tier, number(age.versions), number(age.newest_step), span(age.mean_age_s), span(age.greatest_age_s), span(age.last_age_s)]))));
    const step = report.step_budget, lever = step && step.levers[0], ms = (value) => (known(value) ? number(value * 1000, 1) : "");
    if (step) sections.push(el("section", { class: "card", id: "step" }, el("h2", null, `Where a step of ${span(step.step_s)} goes (rank 0, mean of ${number(step.steps)})`),
      table(["part", "ms", "share", ...(known(step.planned_step_s) ? ["planned ms"] : [])], Object.entries(step.parts_s).map(([part, value]) =>
        [label(part), ms(value), percent(value / step.step_s, 1), ...(known(step.planned_step_s) ? [ms(step.planned_s[part])] : [])])),
      lever ? el("p", null, `Next: ${label(lever.part)}, worth ${percent(lever.worth_share, 0)} of a step at most${lever.usd_per_day > 0 ? `, ${usd(lever.usd_per_day)} a day` : ""}: ${lever.advice}.`) : null));
    if (report.evals.length) sections.push(el("section", { class: "card" }, el("h2", null, "Evaluations"), told_alone(["step", "held-out loss", "execution accuracy", "query match", "questions"],
      report.evals.map((found) => [number(found.step), number(found.loss, 4), percent(found.execution_accuracy, 1), percent(found.query_match, 1), number(found.questions)]))));
    if (report.attempts.length) sections.push(el("section", { class: "card" }, el("h2", null, "Attempts"), table(["attempt", "from", "ranks", "hosts", "steps", "kept", "state from"],
      report.attempts.map((found) => [number(found.attempt), at(found.start_s), number(found.world_size), Object.keys(found.hosts).length, number(found.steps), number(found.steps_kept), found.tier || "–"]))));
    if (report.model) sections.push(el("section", { class: "card" }, el("h2", null, "Model"), table(["", ""],
      Object.entries(report.model).map(([name, value]) => [label(name), typeof value === "number" ? (Math.abs(value) >= 1e9 ? short(value) : number(value, Number.isInteger(value) ? 0 : 4)) : String(value)]))));
    return sections.length ? [el("div", { class: "pairs" }, sections)] : [];
  }

  function log() {
    const lines = [...report.log.problems, ...report.notes], files = Object.entries(report.log.files);
    const torn = files.filter(([, found]) => found.torn_bytes).map(([name]) => name);
    const chain = data.study ? el("p", { class: "sub" }, "Virtual: made by the simulator, folded as a run's log is.") : report.log.verified ? el("p", { class: "good" }, `All ${files.length} hash chains hold.`) : el("p", { class: "bad" }, files.length ? "The log was changed after it was written." : "The log's hash chains were not checked.");
    const reference = report.goodput.reference;
    if (reference) lines.push(`R* is ${number(reference.tokens_per_s, 1)} tokens/s: ${reference.source}${reference.steps ? `, ${reference.steps} steps` : ""}${known(reference.spread) ? `, spread ${percent(reference.spread)}` : ""}.`);
    if (torn.length) lines.push(`Torn last line left out: ${torn.join(", ")}.`);
    return el("section", { class: "card" }, el("h2", null, "The log behind this page"), chain, lines.length ? el("ul", { class: "notes" }, lines.map((line) => el("li", null, line))) : null);
  }

  head();
  charts.node.id = "charts";
  document.getElementById("main").append(...[figures(), next(), charts.node, categories(), incidents(), ...tables(), log()].filter(Boolean));
  document.getElementById("foot").append(`Muster ${report.version || ""} · run ${report.run_id} · newest event ${report.newest_event || UNKNOWN} · charts by uPlot (MIT). Definitions: docs/explanation/goodput.md.`);
  muster.themes(document.getElementById("theme"), charts.draw);
  root.dataset.ready = "yes";
})();
