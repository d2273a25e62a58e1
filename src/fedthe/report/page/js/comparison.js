const { fillComparison } = (() => {
  const signed = (value) => (value === null ? "–" : (value >= -0.05 ? "+" : "") + number(Math.abs(value) < 0.05 ? 0 : value)).replace("-", "−");
  const sayP = (p) => (p === null ? "–" : p < 0.001 ? "< 0.001" : p.toFixed(3));

  // Pairs are stored once: the other way around, signs and bounds change places.
  function look(run, a, b) {
    if (run.pairs[a]?.[b]) return run.pairs[a][b];
    const turned = Object.entries(run.pairs[b]?.[a] ?? {}).map(([test, [ofB, ofA, more, low, high, p, up, down]]) =>
      [test, [ofA, ofB, -more, high === null ? null : -high, low === null ? null : -low, p, down, up]]);
    return turned.length ? Object.fromEntries(turned) : null;
  }

  function fillComparison(run, body) {
    const ids = Object.keys(run.methods).filter((id) => run.scores[id]);
    if (!ids.some((a) => ids.some((b) => a !== b && look(run, a, b)))) return false;
    const average = (id) => mean(Object.values(run.scores[id]).map((score) => score.mean));
    const ranked = [...ids].sort((a, b) => average(b) - average(a));
    const chosen = { a: ranked[0], b: ranked[1] };
    const place = make("div");

    function show() {
      const { a, b } = chosen;
      const rows = a === b ? null : look(run, a, b);
      if (!rows) return place.replaceChildren(make("p", {}, a === b ? "Choose two different methods." : "These methods share no seed."));
      const [nameA, nameB] = [run.methods[a].name, run.methods[b].name];
      const heads = ["test", nameA, nameB, "difference", "95 % interval", "p (Holm)", "up / down"];
      const lines = Object.entries(rows).map(([test, [ofA, ofB, more, low, high, p, up, down]]) => {
        const clear = low !== null && (low > 0 || high < 0);
        const difference = clear ? make("b", {}, signed(more)) : signed(more);
        return [run.tests[test].name, number(ofA), number(ofB), difference, low === null ? "–" : `${signed(low)} to ${signed(high)}`, sayP(p), `${up} / ${down}`];
      });
      const caption = `${nameA} − ${nameB}, accuracy in points. Bold: the interval excludes 0.`
        + (run.seeds === 1 ? " There is one seed: the interval does not cover other seeds." : "");
      place.replaceChildren(makeTable(caption, heads, lines));
    }

    const options = ids.map((id) => [id, run.methods[id].name]);
    const pick = (label, key) => choose(label, options, (value) => { chosen[key] = value; show(); }, chosen[key])[0];
    body.append(make("div", { class: "controls" }, pick("Compare", "a"), pick("with", "b")), place);
    show();
    return true;
  }

  return { fillComparison };
})();
