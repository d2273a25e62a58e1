const { fillFigures } = (() => {
  const FIGURES = { "alpha-beta": addAlphaBeta, "interpolation-": addInterpolation, "curves-": addFigureCurves, streams: addFigureStreams };

  function fillFigures(body) {
    for (const figure of DATA.figures) {
      const place = make("div", {}, make("h3", {}, figure.title), make("p", { class: "what" }, figure.settings));
      const [, add] = Object.entries(FIGURES).find(([start]) => figure.id.startsWith(start));
      body.append(place);
      add(figure, place);
    }
  }

  function addFigureCurves({ methods, tests, data: { curves, rounds } }, place) {
    addCurves(place, methods, tests, (id, test) => (curves[id]?.[test] ? { rounds, ...curves[id][test] } : undefined));
  }

  function addFigureStreams({ methods, tests, data: { streams } }, place) {
    for (const [test, stream] of Object.entries(streams)) {
      const name = tests[test]?.name ?? test;
      const inside = make("div");
      place.append(make("h4", {}, name), inside);
      addStream(inside, methods, name, stream);
    }
  }

  function addAlphaBeta({ methods, tests, data: { alpha, beta, accuracy } }, place) {
    const there = Object.entries(tests).filter(([test]) => accuracy[test]);
    const own = [beta.indexOf(0.1), alpha.indexOf(0.1)]; // the method's defaults
    place.append(
      make("p", { class: "what" }, "Accuracy (%); each panel has its own colour scale. Framed: the method's defaults."),
      addPanels(there.map(([test, { name }]) => {
        const values = accuracy[test].mean;
        const all = known(values.flat());
        return {
          title: name,
          label: `Heat map of the accuracy on the test ${name} by alpha and beta, from ${number(Math.min(...all))} to ${number(Math.max(...all))}.`,
          height: 270,
          build: (width) => drawHeat({
            values, columns: beta.map(String), wide: (width - 60) / beta.length, numbers: true, range: [Math.min(...all), Math.max(...all)],
            margin: { l: 50, r: 10, t: 8, b: 42 },
            xaxis: { side: "bottom", tickangle: 0, title: { text: "beta", standoff: 6 } },
            yaxis: { tickvals: alpha.map((_, i) => i), ticktext: alpha.map(String), title: { text: "alpha", standoff: 6 }, showgrid: false },
            shapes: own.includes(-1) ? [] : [{
              type: "rect", x0: own[0] - 0.5, x1: own[0] + 0.5, y0: own[1] - 0.5, y1: own[1] + 0.5, line: { color: tint(methods.fedthe.colour), width: 2.5 },
            }],
            hover: (i, j) => `alpha ${alpha[i]}, beta ${beta[j]}<br>accuracy ${number(values[i][j], 2)} %`,
          }),
        };
      })),
      addNumbers("accuracy (%) by alpha and beta", () => [
        ["test", "alpha", ...beta.map((each) => `beta ${each}`)],
        there.flatMap(([test, { name }]) => alpha.map((each, i) => [name, String(each), ...accuracy[test].mean[i].map((value) => number(value))])),
      ]));
  }

  function addInterpolation({ methods, tests, data: { e, shared, best, fedthe } }, place) {
    const there = Object.entries(tests).filter(([test]) => shared[test]);
    const looks = [
      ["shared", { name: "one e for all clients", colour: "#0072b2", turn: 0 }],
      ["best", { name: "each client's best e (needs test labels)", colour: "#666666", turn: 1 }],
      ["fedthe", { ...methods.fedthe, name: `${methods.fedthe.name} (an e per sample)` }],
    ];
    const hidden = new Set();
    const charts = addPanels(there.map(([test, { name }]) => {
      const flat = (value) => e.map(() => value);
      const values = { shared: shared[test].mean, best: flat(best[test].mean), fedthe: flat(fedthe[test].mean) };
      const peak = e[values.shared.indexOf(Math.max(...values.shared))];
      return {
        title: name,
        more: `best shared e ${peak}`,
        label: `Accuracy on the test ${name} by e, from 0 (personal) to 1 (global); best at ${peak}. Each client's best e: ${number(best[test].mean)}. ${methods.fedthe.name}: ${number(fedthe[test].mean)}.`,
        height: 250,
        build: () => drawLines(
          looks.map(([id, look]) => ({ id, look, x: e, y: values[id], std: id === "shared" ? shared[test].std : undefined })), hidden,
          { x: "e", y: "accuracy (%)", xaxis: { range: [0, 1] } }),
      };
    }));
    place.append(make("p", { class: "what" }, "At e = 0 the personal head or model answers alone, at e = 1 the global one."),
      addSwitches(looks, hidden, () => spoilWithin(charts)), charts,
      addNumbers("accuracy (%) by e", () => [
        ["test", ...e.map((each) => `e ${each}`), "each client's best e", methods.fedthe.name],
        there.map(([test, { name }]) => [name, ...shared[test].mean.map((value) => number(value)), number(best[test].mean), number(fedthe[test].mean)]),
      ]));
  }

  return { fillFigures };
})();
