"use strict";
// Charts are drawn when they come into view; rollouts are written as text, never as HTML.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const charts = read("charts");
  const font = { family: "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif", size: 12, color: "#1f2933" };
  const axis = { gridcolor: "#e4e8ec", zerolinecolor: "#d5dae0", automargin: true, title: { standoff: 8 } };
  const merge = (base, more) => {
    const result = { ...base };
    for (const [key, value] of Object.entries(more)) {
      const isMap = value && typeof value === "object" && !Array.isArray(value);
      result[key] = isMap ? merge(result[key] || {}, value) : value;
    }
    return result;
  };
  const common = {
    font,
    margin: { l: 56, r: 36, t: 8, b: 40 },
    modebar: { orientation: "v", color: "#b4bcc5", activecolor: "#66717e", bgcolor: "rgba(0,0,0,0)" },
    paper_bgcolor: "#fff",
    plot_bgcolor: "#fff",
    hovermode: "x unified",
    hoverlabel: { font: { size: 12 }, align: "left", namelength: -1 },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", xanchor: "left", font: { size: 12 } },
    showlegend: true,
    xaxis: axis,
    yaxis: axis,
  };
  const config = { displaylogo: false, responsive: true, modeBarButtons: [["resetScale2d", "toImage"]] };

  const draw = (element) => {
    const spec = charts[Number(element.dataset.chart)];
    Plotly.newPlot(element, spec.data, merge(common, spec.layout), config).then(() => {
      if (!performance.getEntriesByName("first-chart").length) performance.mark("first-chart");
    });
  };
  // One chart per task, so that the page reacts in between.
  const waiting = [];
  const drawNext = () => {
    const element = waiting.shift();
    if (!element) return;
    if (!element.classList.contains("js-plotly-plot")) draw(element);
    setTimeout(drawNext);
  };
  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) {
          observer.unobserve(entry.target);
          waiting.push(entry.target);
        }
      }
      setTimeout(drawNext);
    },
    { rootMargin: "200px" },
  );
  const elements = document.querySelectorAll("[data-chart]");
  const start = () => {
    // The library is compiled after the page can be read: its text becomes a script, which the policy knows by its hash.
    const library = document.createElement("script");
    library.textContent = document.getElementById("plotly").textContent;
    document.head.append(library);
    elements.forEach((element) => observer.observe(element));
  };
  if (elements.length) window.addEventListener("load", () => requestAnimationFrame(() => setTimeout(start)));
  window.addEventListener("beforeprint", () =>
    elements.forEach((element) => {
      observer.unobserve(element);
      if (window.Plotly && !element.classList.contains("js-plotly-plot")) draw(element);
    }),
  );

  const place = document.getElementById("rollouts");
  if (!place) return;
  const records = read("records");
  const PAGE = 20;
  let first = 0;

  const add = (parent, tag, text, className) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    parent.append(element);
    return element;
  };
  const distinct = (key) => [...new Set(records.map((record) => record[key]))].filter((value) => value !== "");
  const filters = add(place, "div", undefined, "filters");
  const inputs = {};
  const select = (key, label, options) => {
    if (options.length < 2) return;
    const list = add(add(filters, "label", `${label} `), "select");
    add(list, "option", "all").value = "";
    options.forEach((option) => (add(list, "option", option).value = option));
    inputs[key] = list;
  };
  const field = (key, label, type) => {
    const input = add(add(filters, "label", `${label} `), "input");
    input.type = type;
    if (type === "number") input.step = "any";
    inputs[key] = input;
  };
  select("run", "run", distinct("run"));
  select("kind", "kind", distinct("kind"));
  select("domain", "domain", distinct("domain"));
  field("from", "steps from", "number");
  field("to", "to", "number");
  field("least", "reward from", "number");
  field("most", "to", "number");
  select("state", "ended", ["by itself", "cut off", "reward failed"]);
  field("text", "text", "search");
  const order = add(add(filters, "label", "order "), "select");
  ["by step", "best reward first", "worst reward first", "longest first"].forEach((name) => add(order, "option", name));
  inputs.order = order;
  const count = add(filters, "span");
  const holder = add(place, "div", undefined, "table");
  const turn = add(place, "div", undefined, "filters");
  const back = add(turn, "button", "previous");
  const next = add(turn, "button", "next");

  const value = (key) => (inputs[key] ? inputs[key].value : "");
  const within = (x, low, high) => (low === "" || (x !== null && x >= Number(low))) && (high === "" || (x !== null && x <= Number(high)));
  const matches = (record) => {
    for (const key of ["run", "kind", "domain"]) if (value(key) !== "" && record[key] !== value(key)) return false;
    if (!within(record.step, value("from"), value("to"))) return false;
    if (!within(record.reward, value("least"), value("most"))) return false;
    const state = value("state");
    if (state === "by itself" && !record.finished) return false;
    if (state === "cut off" && record.finished) return false;
    if (state === "reward failed" && !record.failed) return false;
    const text = value("text").toLowerCase();
    return !text || [record.prompt, record.response, record.answer, record.marks].some((part) => part.toLowerCase().includes(text));
  };
  const ordered = (found) => {
    const by = (score) => found.sort((a, b) => score(b) - score(a));
    const reward = (record, missing) => (record.reward === null ? missing : record.reward);
    if (order.selectedIndex === 1) return by((record) => reward(record, -Infinity));
    if (order.selectedIndex === 2) return by((record) => -reward(record, Infinity));
    if (order.selectedIndex === 3) return by((record) => record.response_tokens ?? -1);
    return found;
  };
  const several = distinct("run").length > 1;
  const show = () => {
    const found = ordered(records.filter(matches));
    first = Math.max(0, Math.min(first, Math.floor((found.length - 1) / PAGE) * PAGE));
    const last = Math.min(first + PAGE, found.length);
    count.textContent = found.length ? `${first + 1} to ${last} of ${found.length}` : "none match";
    back.disabled = first === 0;
    next.disabled = last >= found.length;
    holder.replaceChildren();
    const table = add(holder, "table");
    const head = add(add(table, "thead"), "tr");
    const names = [...(several ? ["run"] : []), "step", "kind", "reward", "tokens", "ended", "prompt and response", "answer, marks"];
    names.forEach((name) => add(head, "th", name, name === "prompt and response" ? "texts" : ""));
    const body = add(table, "tbody");
    found.slice(first, last).forEach((record) => {
      const row = add(body, "tr");
      if (several) add(row, "td", record.run);
      add(row, "td", record.step ?? "");
      add(row, "td", [record.kind, record.domain].filter(Boolean).join(", "));
      add(row, "td", record.reward === null ? "none" : String(Number(record.reward.toPrecision(4))));
      add(row, "td", record.response_tokens ?? "");
      add(row, "td", record.failed ? "reward failed" : record.finished ? "by itself" : "cut off");
      const texts = add(row, "td");
      add(texts, "pre", record.prompt, "text prompt");
      add(texts, "pre", record.response, "text");
      const extra = add(row, "td");
      if (record.answer) add(extra, "div", record.answer);
      if (record.marks) add(extra, "div", record.marks, "note");
    });
  };
  filters.addEventListener("input", () => {
    first = 0;
    show();
  });
  back.addEventListener("click", () => {
    first -= PAGE;
    show();
  });
  next.addEventListener("click", () => {
    first += PAGE;
    show();
  });
  show();
})();
