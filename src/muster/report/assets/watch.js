"use strict";
/* The watching page: asks its server for the runs again and again, and draws what is new. */
(() => {
  const { UNKNOWN, known, number, percent, usd, span, short, el, table, say, themes } = muster;
  const root = document.documentElement, EVERY_MS = 1000, STORED = "muster-watch-key";

  // ------------------------------------------------------------ the key

  let key = null;
  async function post(path, body) {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    return fetch(path, { method: "POST", body, headers, cache: "no-store", credentials: "omit", redirect: "error" });
  }
  // The code leaves the address, and so the history, before it is used.
  async function enter() {
    const code = location.hash.slice(1);
    history.replaceState(null, "", "/");
    if (code) {
      const answer = await post("/session", code);
      if (answer.ok) { key = (await answer.json()).key; sessionStorage.setItem(STORED, key); return true; }
    }
    key = sessionStorage.getItem(STORED);
    return known(key);
  }

  // ------------------------------------------------------------ one run

  const age = (value) => (known(value) ? span(value) : "–");
  const tone = (view) => ({ succeeded: "good", running: "good", failed: "bad" }[view.state] || "warn");
  const STATES = { training: "good", lost: "bad", quarantined: "bad" };

  function figure(name, value, more) {
    return el("div", { class: "figure" }, el("div", { class: "name" }, name), el("div", { class: "value" }, value), more ? el("div", { class: "more" }, more) : null);
  }

  function figures(view, report) {
    const found = [figure("Step", known(view.total_steps) ? `${number(view.step)} of ${number(view.total_steps)}` : number(view.step),
      [known(view.eta_s) ? `ETA ${span(view.eta_s)}` : null, known(view.step_age_s) ? `${age(view.step_age_s)} ago` : null].filter(Boolean).join(", "))];
    for (const text of view.figures) {
      const [, name, value] = text.match(/^(loss|MFU) (.*)$/) || [null, "Tokens/s", text.replace(" tokens/s", "")];
      found.push(figure(name === "loss" ? "Loss" : name, value));
    }
    if (view.heldout) found.push(figure("Held-out loss", number(view.heldout.loss, 4), `after step ${number(view.heldout.step)}`));
    if (report && known(report.execution_accuracy)) found.push(figure("Execution accuracy", percent(report.execution_accuracy, 1)));
    if (report) found.push(figure("Time", span(report.wall_s)));
    if (report && report.cost.usd > 0) found.push(figure("Cost so far", usd(report.cost.usd)));
    if (report && known(report.goodput.active)) found.push(figure("Goodput", percent(report.goodput.active, 1), report.goodput.purchased === report.goodput.active ? null : `${percent(report.goodput.purchased, 1)} of purchased hosts`));
    return el("div", { class: "figures" }, found);
  }

  function place(run) {
    const now = el("div", { class: "now" }), incidents = el("div", { class: "now" }), node = el("section", { class: "run", "data-run": run.run_id }, now, incidents);
    let charts = null, report = null, drawn = "", version = 0;
    function update(got) {
      if (got.account) {
        report = got.account.report;
        version = got.version;
        const kept = charts && charts.kept();
        if (charts) charts.remove();
        charts = muster.charts(report, got.account.series, kept, true);
        node.insertBefore(charts.node, incidents);
        charts.draw();
      }
      const text = JSON.stringify([got.view, version]);
      if (text === drawn || got.view.state === undefined) return;
      drawn = text;
      show(got.view, got.run_id);
    }
    function show(view, run_id) {
      const axes = Object.entries(view.layout).filter(([, size]) => size !== 1).map(([axis, size]) => `${axis} ${size}`).join(" x ") || "one rank";
      const done = view.total_steps ? Math.min(1, view.step / view.total_steps) : null;
      now.replaceChildren(...[
        el("h2", null, run_id, el("span", { class: `badge ${tone(view)}` }, view.state)),
        el("p", { class: "sub" }, view.sentence || "", view.problem ? ` (${view.problem})` : ""),
        known(done) ? el("div", { class: "bar", role: "progressbar", "aria-valuenow": String(Math.round(done * 100)), "aria-valuemin": "0", "aria-valuemax": "100", "aria-label": "Steps done" }, el("span", { style: { width: `${done * 100}%` } })) : null,
        figures(view, report),
        el("div", { class: "two" },
          el("div", { class: "card" }, el("h3", null, "Hosts", el("span", { class: "about" }, `attempt ${view.attempt}, ${view.world_size} rank${view.world_size === 1 ? "" : "s"} (${axes})`)),
            table(["host", "state", "ranks"], view.hosts.map((host) => [host.name, el("span", { class: STATES[host.state] || "" }, host.state), host.ranks.map((rank) => `${rank.rank} ${rank.phase} (pid ${rank.pid})`).join(", ") || "–"]))),
          el("div", { class: "card" }, el("h3", null, "Newest whole step"), table(["tier", "step", "age"], view.tiers.map((tier) => [tier.tier, known(tier.step) ? number(tier.step) : "none", age(tier.age_s)])))),
        ...view.damaged.map((line) => el("p", { class: "bad" }, `event log: ${line}`)),
      ].filter(Boolean));
      incidents.replaceChildren(...(view.incidents.length ? [el("section", { class: "card" }, el("h3", null, "Last incidents"), el("ul", { class: "notes" }, view.incidents.map((line) => el("li", null, line))))] : []));
    }
    return { node, update, draw: () => charts && charts.draw(), version: () => version };
  }

  // ------------------------------------------------------------ all of them

  const state = el("div", { class: "sub" }), button = el("button", { id: "theme", type: "button" }, "Dark");
  const grid = el("div", { class: "runs" }), places = new Map();
  document.getElementById("head").append(el("div", null, el("h1", null, "Muster watch"), state), button);
  document.getElementById("main").append(grid);
  document.getElementById("foot").append("Looking changes nothing: closing this page does not end a run. Charts by uPlot (MIT).");

  function report(text) { if (state.textContent !== text) { state.textContent = text; say(text); } }

  function take(runs) {
    for (const run of runs) {
      if (!places.has(run.run_id)) { const made = place(run); places.set(run.run_id, made); grid.append(made.node); }
      places.get(run.run_id).update(run);
    }
    grid.classList.toggle("several", runs.length > 1);
    const left = runs.filter((run) => run.view.ended !== true).length;
    report(left ? `${runs.length === 1 ? "One run" : `${runs.length} runs, ${left} of them not ended`}, looked at again and again` : runs.length === 1 ? "The run has ended." : "All runs have ended.");
  }

  async function ask() {
    const have = Object.fromEntries([...places].map(([run_id, one]) => [run_id, one.version()]));
    let answer = null, runs = null;
    try {
      answer = await post("/data", JSON.stringify({ have }));
      runs = answer.ok ? (await answer.json()).runs : null;
    } catch {
      report("muster watch does not answer: it was ended, or its machine is gone. The runs are unchanged.");
    }
    root.dataset.ready = "yes";
    if (answer && !answer.ok) { report("This page was opened by another muster watch: take the address that the one that runs now has printed."); return; }
    setTimeout(ask, EVERY_MS);
    if (runs) take(runs);
  }

  addEventListener("hashchange", () => { if (location.hash) location.reload(); }); // a new address in the same tab
  themes(button, () => { for (const one of places.values()) one.draw(); });
  enter().then((may) => {
    if (may) return ask();
    report("This address has opened a page before, and opens no second one: muster watch has printed a new one.");
    root.dataset.ready = "yes";
  }, () => report("muster watch does not answer."));
})();
