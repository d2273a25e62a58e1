(() => {
  const FILLS = { streams: fillStreams, comparison: fillComparison, trade: fillTrade, severity: fillSeverity, clients: fillClients, curves: fillCurves, weights: fillWeights, examples: fillExamples };

  function showRun(run) {
    for (const [id, fill] of Object.entries(FILLS)) {
      const section = document.getElementById(id);
      if (!section) continue;
      const body = $(".drawn", section);
      dropCharts(body);
      body.replaceChildren();
      if (DATA.runs.length > 1) $(".of-run", section).textContent = `Run: ${run.name}`; // printed pages lack the selector
      const there = fill(run, body);
      section.hidden = !there;
      $(`nav a[href="#${id}"]`).parentElement.hidden = !there;
    }
  }

  if (DATA.runs.length) showRun(DATA.runs[0]);
  if ($("#run")) $("#run").addEventListener("change", (event) => showRun(DATA.runs[Number(event.target.value)]));
  if ($("#figures")) fillFigures($("#figures .drawn"));
})();
