function fillSeverity(run, body) {
  const levels = run.severities;
  if (!levels.length) return false;
  const tests = Object.keys(run.tests);
  const hidden = new Set();
  const lines = Object.entries(run.methods).filter(([id]) => run.scores[id]);
  if (!lines.length) return false;
  const curves = lines.map(([id, look]) => ({
    id, look, x: levels, y: tests.map((test) => run.scores[id][test]?.mean ?? null), std: tests.map((test) => run.scores[id][test]?.std ?? null),
  }));
  body.append(
    addChart({
      label: `Accuracy by corruption severity, ${levels[0]} to ${levels[levels.length - 1]}, for ${count(lines.length, "method")}.`,
      height: 400,
      build: () => drawLines(curves, hidden, { x: "severity", y: "accuracy (%)", markers: true, xaxis: { dtick: 1 } }),
    }),
    addSwitches(lines, hidden, () => spoilWithin(body)));
  return true;
}
