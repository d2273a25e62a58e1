const { drawLines, countRounds, addCurves } = (() => {
  const DASHES = ["solid", "dash", "dot", "dashdot"];

  // The indices of a line, in pieces that begin at `breaks`
  function cutLine(at, breaks) {
    const pieces = [[]];
    at.forEach((value, i) => {
      if (i > 0 && breaks.some((place) => at[i - 1] < place && place <= value)) pieces.push([]);
      pieces[pieces.length - 1].push(i);
    });
    return pieces;
  }

  // Nothing is drawn from one piece to the next: `of` an index, or of null between two
  const join = (pieces, of) => pieces.flatMap((piece, i) => [...(i ? [null] : []), ...piece.map(of)]);

  // The band of a standard deviation around each piece: there above the line, and back below it
  function outline(pieces, at, values, std) {
    const around = pieces.map((piece) => [...piece.map((i) => [i, 1]), ...[...piece].reverse().map((i) => [i, -1])]);
    return { x: join(around, ([i]) => at[i]), y: join(around, ([i, side]) => values[i] + side * std[i]) };
  }

  function drawLines(curves, hidden, { x, y, xaxis = {}, yaxis = {}, markers = false, digits = 1, shapes = [], breaks = [] }) {
    const shown = curves.filter(({ id }) => !hidden.has(id));
    const data = [];
    if (shown.length <= 6) {
      for (const { look, x: at, y: values, std } of shown) {
        if (!std || std.some((each) => each === null) || std.every((each) => each === 0)) continue;
        data.push({
          type: "scatter", mode: "lines", hoverinfo: "skip", fill: "toself", fillcolor: fade(tint(look.colour), 0.12), line: { width: 0 },
          ...outline(cutLine(at, breaks), at, values, std),
        });
      }
    }
    for (const { look, x: at, y: values, std } of shown) {
      const pieces = cutLine(at, breaks);
      data.push({
        type: "scatter", mode: markers ? "lines+markers" : "lines", x: join(pieces, (i) => at[i]), y: join(pieces, (i) => values[i]),
        line: { color: tint(look.colour), width: 2, dash: DASHES[look.turn % 4] }, marker: { size: 6 },
        hovertext: join(pieces, (i) =>
          `${plain(cut(look.name, 60))}<br>${x} ${at[i]}: ${number(values[i], digits)}${std && std[i] !== null ? ` ± ${number(std[i], digits)}` : ""}`),
        hoverinfo: "text",
      });
    }
    return { data, layout: { shapes, xaxis: { title: { text: x, standoff: 8 }, ...xaxis }, yaxis: { title: { text: y, standoff: 8 }, ...yaxis } } };
  }

  // Ticks at whole rounds; a single round is centred.
  function countRounds(rounds) {
    const [low, high] = [Math.min(...rounds), Math.max(...rounds)];
    if (high - low > 10) return {};
    return { dtick: 1, tick0: 0, ...(low === high ? { range: [low - 0.5, low + 0.5] } : {}) };
  }

  function addCurves(body, methods, tests, curveOf) {
    const hidden = new Set();
    const charts = make("div");
    const there = Object.entries(methods).filter(([id]) => Object.keys(tests).some((test) => curveOf(id, test)));
    const rounds = [...new Set(there.flatMap(([id]) => Object.keys(tests).flatMap((test) => curveOf(id, test)?.rounds ?? [])))]
      .sort((a, b) => a - b);
    charts.append(addPanels(Object.entries(tests)
      .filter(([test]) => there.some(([id]) => curveOf(id, test)))
      .map(([test, { name }]) => ({
        title: name,
        label: `Learning curves on the test ${name}: accuracy by round, for ${count(there.length, "method")}.`,
        height: 250,
        build: () => drawLines(
          there.filter(([id]) => curveOf(id, test)).map(([id, look]) => {
            const { rounds: x, mean: y, std } = curveOf(id, test);
            return { id, look, x, y, std };
          }), hidden, { x: "rounds", y: "accuracy (%)", markers: true, xaxis: countRounds(rounds) }),
      }))));
    body.append(addSwitches(there, hidden, () => spoilWithin(charts)), charts, addNumbers("accuracy (%) by round", () => [
      ["method", "test", ...rounds.map(String)],
      there.flatMap(([id, look]) => Object.entries(tests).filter(([test]) => curveOf(id, test)).map(([test, { name }]) => {
        const curve = curveOf(id, test);
        return [look.name, name, ...rounds.map((round) => number(curve.mean[curve.rounds.indexOf(round)]))];
      })),
    ]));
  }

  return { drawLines, countRounds, addCurves };
})();
