const { fillCurves } = (() => {
  function fillCurves(run, body) {
    const curves = Object.keys(run.curves).length > 0;
    if (curves) addCurves(body, run.methods, run.tests, (id, test) => run.curves[id]?.[test]);
    if (run.losses.length) addLosses(run, body);
    return curves || run.losses.length > 0;
  }

  const STEPS = [-4, -3, -2, -1, 0, 1, 2].flatMap((power) => [1, 2, 5].map((step) => Number(`${step}e${power}`)));

  function addLosses(run, body) {
    const hidden = new Set();
    const lines = run.losses.map((line, i) => [String(i), {
      name: line.name, colour: run.methods[line.method]?.colour ?? "#888888", turn: run.methods[line.method]?.turn ?? 0,
    }]);
    const all = known(run.losses.flatMap(({ losses }) => losses));
    const longest = Math.max(...run.losses.map(({ rounds }) => rounds.length));
    const log = Math.min(...all) > 0 && Math.max(...all) > 5 * Math.min(...all);
    const chart = addChart({
      label: `Mean local loss by round, for ${count(lines.length, "training")}.`,
      height: 320,
      build: () => drawLines(
        run.losses.map((line, i) => ({ id: String(i), look: lines[i][1], x: line.rounds, y: line.losses })), hidden,
        { x: "round", y: "mean local loss", digits: 3, markers: longest <= 10, xaxis: countRounds(run.losses.flatMap(({ rounds }) => rounds)), yaxis: log ? { type: "log", tickvals: STEPS, ticktext: STEPS.map(String) } : {} }),
    });
    const last = (values) => values[values.length - 1];
    body.append(
      make("h3", {}, "Training loss"),
      make("p", { class: "what" }, `Mean local loss after each round, mean over seeds${log ? "; logarithmic scale" : ""}.`),
      addSwitches(lines, hidden, () => spoil(chart)), chart,
      addNumbers("mean local loss", () => [
        ["training", "first round", "halfway", "last round"],
        run.losses.map(({ name, losses }) => [name, losses[0], losses[Math.floor((losses.length - 1) / 2)], last(losses)]
          .map((each) => (typeof each === "string" ? each : number(each, 3)))),
      ]));
  }

  return { fillCurves };
})();
