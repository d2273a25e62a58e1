const { drawHeat } = (() => {
  function drawHeat({ values, margin, yaxis, xaxis = {}, shapes, columns, wide, numbers, hover, tilted = false, range = [0, 100] }) {
    const scale = ["heat-low", "heat-middle", "heat-high"].map(readParts);
    const data = [{
      type: "heatmap", z: values, zmin: range[0], zmax: range[1], showscale: false, xgap: 1, ygap: numbers ? 1 : 0,
      colorscale: scale.map((rgb, i) => [i / 2, `rgb(${rgb})`]), hoverinfo: "text", hoverongaps: true,
      hovertext: values.map((row, i) => row.map((_, j) => hover(i, j))),
    }];
    if (numbers) {
      const cells = values.flatMap((row, i) => row.map((value, j) => ({ value, i, j })));
      data.push({
        type: "scatter", mode: "text", hoverinfo: "skip", x: cells.map(({ j }) => j), y: cells.map(({ i }) => i),
        text: cells.map(({ value }) => number(value, wide < 40 ? 0 : 1)),
        textfont: { size: 11, color: cells.map(({ value }) => (value === null ? read("soft") : pickInk(mixScale(scale, value, range)))) },
      });
    }
    return {
      data,
      layout: {
        margin, shapes,
        xaxis: {
          side: "top", range: [-0.5, columns.length - 0.5], tickvals: columns.map((_, i) => i), showgrid: false, automargin: false,
          tickangle: tilted ? -90 : 0,
          ticktext: columns.map((column) => (tilted ? plain(cut(column, 14)) : wrap(column, Math.max(8, Math.floor(wide / 7))))),
          ...xaxis,
        },
        yaxis,
      },
    };
  }

  // The colour of a value on a scale of three colours
  function mixScale(scale, value, [low, high]) {
    const at = 2 * Math.min(1, Math.max(0, (value - low) / (high - low || 1)));
    const [from, to] = at <= 1 ? [scale[0], scale[1]] : [scale[1], scale[2]];
    return from.map((part, i) => part + (to[i] - part) * (at <= 1 ? at : at - 1));
  }

  const pickInk = (rgb) => (luminance(rgb) > 0.179 ? "#000000" : "#ffffff");

  return { drawHeat };
})();
