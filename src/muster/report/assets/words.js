"use strict";
/* What every page says alike: colours of states, numbers in words, elements, tables, the theme. */
const muster = (() => {
  const root = document.documentElement;
  const COLORS = {
    train: "#2fa36f", productive: "#2fa36f", provision: "#8b98a8", start: "#6d84a3", restore: "#4d8fd6", warmup: "#9b7fe6",
    data_wait: "#35b3d4", checkpoint: "#3d6fe0", straggler: "#d6a314", degraded: "#b0842b", eval: "#20b2a4", detect: "#d93a42",
    restart: "#f07b24", wait: "#f2b13c", unfinished: "#e88aa0", redone: "#b82e72", spare: "#b9c3cf", out: "#7b5a4e",
    hold: "#a79bd0", idle: "#cfc9c0", other: "#93a1b0", unattributed: "#4a4f57",
    overhead: "#5e6b7a", stopped: "#dcd6cd",
  };

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
  function clock(value, tenths) {
    // Rounded before it is cut, so that no second is the sixtieth.
    const digits = tenths && value % 1 ? 1 : 0, t = +Math.abs(value).toFixed(digits);
    const sign = value < 0 ? "-" : "", h = Math.floor(t / 3600), m = Math.floor((t % 3600) / 60);
    const seconds = (t % 60).toFixed(digits).padStart(digits ? 4 : 2, "0");
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
      else if (known(value) && value !== false) node.setAttribute(key, value === true ? "" : value);
    }
    for (const child of children.flat()) if (known(child) && child !== false) node.append(child);
    return node;
  }

  function table(names, rows) {
    const cell = (tag, value, position) => el(tag, position ? { class: "n" } : null, value);
    return el("div", { class: rows.length > 12 ? "wide tall" : "wide", tabindex: rows.length > 12 ? "0" : null }, el("table", null, el("thead", null, el("tr", null, names.map((name, i) => cell("th", name, i)))),
      el("tbody", null, rows.map((row) => el("tr", null, row.map((value, i) => cell("td", value, i)))))));
  }

  const say = (text) => { document.getElementById("said").textContent = text; };
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // The theme: what was chosen before, else the system's. `button`: where it is switched; `draw`: after each change.
  function themes(button, draw) {
    const wanted = matchMedia("(prefers-color-scheme: dark)");
    const stored = (value) => { try { return value === undefined ? localStorage.getItem("muster-theme") : localStorage.setItem("muster-theme", value); } catch { return null; } };
    const take = (name) => {
      root.dataset.theme = name;
      button.textContent = name === "dark" ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to the ${name === "dark" ? "light" : "dark"} theme`);
      draw();
    };
    button.addEventListener("click", () => { const name = root.dataset.theme === "dark" ? "light" : "dark"; stored(name); take(name); });
    wanted.addEventListener("change", (event) => { if (!stored()) take(event.matches ? "dark" : "light"); });
    take(stored() || (wanted.matches ? "dark" : "light"));
  }

  return { COLORS, UNKNOWN, known, number, percent, usd, bytes, span, clock, short, label, el, table, say, color, themes };
})();
