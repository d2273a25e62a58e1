const { addChart, dropCharts, spoil, spoilWithin, drawAll, loadPlotly } = (() => {
  // Charts are drawn when they scroll into view, and again when the theme, their width or a choice changes.
  const charts = new Map(); // by element: how to build it, whether it is in view, and whether it is drawn
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.get(entry.target);
      if (!chart) continue;
      chart.seen = entry.isIntersecting;
      refresh(entry.target);
    }
  }, { rootMargin: "300px" });
  const sized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const chart = charts.get(target);
      if (chart && chart.width && Math.abs(chart.width - target.clientWidth) > 1) spoil(target);
    }
  });

  function addChart({ label, height, build, click }) {
    const element = make("div", { class: "chart" + (click ? " clickable" : ""), role: "img", "aria-label": label });
    element.style.height = height + "px";
    charts.set(element, { build, click, height, seen: false, drawn: false });
    seen.observe(element);
    sized.observe(element);
    return element;
  }

  function refresh(element) {
    const chart = charts.get(element);
    if (chart.seen && !chart.drawn) draw(element);
  }

  function spoil(element) {
    charts.get(element).drawn = false;
    refresh(element);
  }

  function draw(element) {
    const chart = charts.get(element);
    if (!window.Plotly || !element.isConnected || !element.clientWidth) return;
    const first = !chart.width;
    chart.drawn = true;
    chart.width = element.clientWidth;
    const { data, layout } = chart.build(chart.width);
    const axis = {
      color: read("soft"), gridcolor: read("line"), linecolor: read("line"), zeroline: false, fixedrange: true, automargin: true,
      title: { standoff: 8 },
    };
    const whole = {
      width: chart.width, height: chart.height, margin: { l: 44, r: 12, t: 10, b: 40 }, showlegend: false, dragmode: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
      font: { family: "system-ui, sans-serif", size: 12, color: read("ink") },
      hoverlabel: { bgcolor: read("raised"), bordercolor: read("line"), font: { color: read("ink") }, align: "left" },
      ...layout,
      xaxis: { ...axis, ...layout.xaxis },
      yaxis: { ...axis, ...layout.yaxis },
    };
    window.Plotly.react(element, data, whole, { displayModeBar: false, typesetMath: false, responsive: false, scrollZoom: false });
    if (first && chart.click) element.on("plotly_click", (event) => chart.click(event.points[0]));
  }

  function dropCharts(within) {
    for (const element of $$(".chart", within)) {
      if (charts.get(element).width) window.Plotly.purge(element);
      seen.unobserve(element);
      sized.unobserve(element);
      charts.delete(element);
    }
  }

  const drawAll = () => [...charts.keys()].forEach(draw);
  const spoilWithin = (element) => $$(".chart", element).forEach(spoil);

  // Plotly is large: load it once the page is usable.
  function loadPlotly() {
    if (window.Plotly) return;
    document.head.append(make("script", {}, $("#plotly").textContent));
    [...charts.keys()].forEach(refresh);
  }

  window.addEventListener("load", () => requestAnimationFrame(() => setTimeout(loadPlotly)));

  return { addChart, dropCharts, spoil, spoilWithin, drawAll, loadPlotly };
})();
