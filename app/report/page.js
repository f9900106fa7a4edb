"use strict";
// Draws the page's figures with Plotly, leads them through steps, and shows chosen ranks alone.
// plot.py says what a panel holds.
(function () {
  const panels = JSON.parse(document.getElementById("panels").textContent);
  const groups = JSON.parse(document.getElementById("rank-groups").textContent);
  const chosen = {}; // run -> Set of ranks; absent: all
  const config = {
    responsive: true,
    displaylogo: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
  };
  const axis = { gridcolor: "#e5e9ef", zeroline: false, automargin: true };
  const base = {
    font: { family: "Inter, Segoe UI, Liberation Sans, Arial, sans-serif", size: 12, color: "#1f2933" },
    margin: { l: 56, r: 12, t: 34, b: 46 },
    hovermode: "closest",
    legend: { orientation: "h", y: 1.01, yanchor: "bottom", traceorder: "normal", font: { size: 11 } },
    paper_bgcolor: "#fff",
    plot_bgcolor: "#fff",
  };

  // A trace with the entries of the chosen ranks alone.
  function kept(trace, ranks) {
    if (!ranks || !trace.meta || !trace.meta.ranks) return trace;
    const at = [];
    trace.meta.ranks.forEach((rank, i) => { if (ranks.has(rank)) at.push(i); });
    const out = Object.assign({}, trace);
    for (const field of trace.meta.fields) out[field] = at.map((i) => trace[field][i]);
    return out;
  }

  function draw(panel) {
    const box = document.getElementById(panel.id);
    const data = panel.by_step ? panel.by_step[panel.at || 0][1] : panel.data;
    // Where a figure is narrow its legend needs a line an entry.
    const legend = box.clientWidth < 480 && data.length > 2 ? 17 * data.length : 0;
    const layout = Object.assign({}, base, panel.layout, { height: panel.height + legend });
    box.style.height = `${layout.height}px`;
    layout.xaxis = Object.assign({}, axis, panel.layout.xaxis);
    layout.yaxis = Object.assign({}, axis, panel.layout.yaxis);
    const shown = data.map((trace) => kept(trace, chosen[panel.run]));
    box.classList.add("drawn");
    return Plotly.react(box, shown, layout, config);
  }

  function bindSlider(panel) {
    const input = document.querySelector(`input[data-panel="${panel.id}"]`);
    if (!input) return;
    const told = input.parentNode.querySelector("output");
    input.addEventListener("input", () => {
      panel.at = Number(input.value);
      told.textContent = panel.by_step[panel.at][0];
      draw(panel);
    });
  }

  for (const select of document.querySelectorAll("select[data-run]")) {
    const run = select.dataset.run;
    select.addEventListener("change", () => {
      const group = groups[run][Number(select.value)];
      if (group) chosen[run] = new Set(group[1]); else delete chosen[run];
      panels.filter((panel) => panel.run === run).forEach(draw);
    });
  }

  // One figure at a time, so that the page answers while they are drawn.
  const waiting = panels.slice();
  function next() {
    const panel = waiting.shift();
    if (!panel) {
      document.body.dataset.drawn = String(panels.length);
      return;
    }
    bindSlider(panel);
    draw(panel);
    setTimeout(next, 0);
  }
  next();
})();
