const { fillWeights } = (() => {
  function fillWeights(run, body) {
    const methods = Object.keys(run.methods).filter((id) => run.weights[id]);
    if (!methods.length) return false;
    addMethodChoice(run, methods, body, (method) => {
      const weights = run.weights[method];
      const tests = Object.entries(run.tests).filter(([test]) => weights[test]);
      const high = Math.max(...tests.flatMap(([test]) => weights[test].shares));
      return [
        addPanels(tests.map(([test, look]) => ({
          title: look.name,
          more: `mean ${number(weights[test].mean, 2)}`,
          label: `Histogram of the weight of the personal head on the test ${look.name}; its mean is ${number(weights[test].mean, 2)}.`,
          height: 200,
          build: () => drawWeights(weights[test], look, high),
        }))),
        addNumbers("samples (%) by weight of the personal head", () => [
          ["test", "mean", "0 to 0.2", "0.2 to 0.4", "0.4 to 0.6", "0.6 to 0.8", "0.8 to 1"],
          tests.map(([test, { name }]) => [name, number(weights[test].mean, 2), ...[0, 1, 2, 3, 4].map((fifth) => number(100 * sumFifth(weights[test].shares, fifth)))]),
        ]),
      ];
    });
    return true;
  }

  const sumFifth = (shares, fifth) =>
    shares.slice((fifth * shares.length) / 5, ((fifth + 1) * shares.length) / 5).reduce((sum, share) => sum + share, 0);

  function drawWeights({ shares, mean: average }, look, high) {
    const colour = tint(look.colour);
    const edges = Array.from({ length: shares.length + 1 }, (_, i) => i / shares.length);
    const ticks = [0, 1, 5, 10, 25, 50, 100].filter((percent) => percent <= Math.max(5, 125 * high));
    return {
      data: [{
        type: "scatter", mode: "lines", x: edges, y: [...shares, shares[shares.length - 1]].map((share) => Math.sqrt(100 * share)),
        line: { shape: "hv", color: colour, width: 1.5 }, fill: "tozeroy", fillcolor: fade(colour, 0.25), hoverinfo: "text",
        hovertext: edges.map((edge, i) => `${edge.toFixed(3)} to ${(edges[i + 1] ?? 1).toFixed(3)}: ${number(100 * (shares[i] ?? shares[i - 1]))} % of samples`),
      }],
      layout: {
        shapes: [{ type: "line", x0: average, x1: average, y0: 0, y1: 1, yref: "paper", line: { color: read("ink"), width: 1.5, dash: "dot" } }],
        xaxis: { range: [0, 1], dtick: 0.25, title: { text: "1 - e", standoff: 6 } },
        yaxis: { range: [0, Math.sqrt(Math.max(5, 110 * high))], tickvals: ticks.map(Math.sqrt), ticktext: ticks.map((percent) => `${percent} %`) },
      },
    };
  }

  return { fillWeights };
})();
