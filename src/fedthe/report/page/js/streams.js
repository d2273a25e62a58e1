const { fillStreams, addStream } = (() => {
  const WIDE = 7; // pixels per letter of a label

  // The tables are on the page; charts go above them.
  function fillStreams(run) {
    let any = false;
    for (const stream of $$("#streams .stream")) {
      const place = $(".place", stream);
      dropCharts(place);
      place.replaceChildren();
      stream.hidden = DATA.runs[Number(stream.dataset.run)] !== run;
      any ||= !stream.hidden;
      const test = place.dataset.test;
      if (!stream.hidden && run.streams[test]) addStream(place, run.methods, run.tests[test]?.name ?? test, run.streams[test]);
    }
    return any;
  }

  function addStream(place, methods, name, { bands, phases, curves, first }) {
    const there = Object.entries(methods).filter(([id]) => curves[id]);
    const hidden = new Set(there.map(([id]) => id).filter((id) => !first.includes(id)));
    const end = Math.max(...bands.map(([, last]) => last));
    const breaks = bands.filter(([from, to]) => to - from > 1).map(([from]) => from); // one point draws no line
    const chart = addChart({
      label: `Accuracy along the stream ${name}, ${count(end, "sample")} in ${count(bands.length, "segment")}, for ${count(there.length, "method")}.`,
      height: 330,
      build: (width) => {
        const lines = there.map(([id, look]) => ({ id, look, x: curves[id].positions, y: curves[id].mean, std: curves[id].std }));
        const { data, layout } = drawLines(lines, hidden, {
          x: "sample", y: "accuracy (%)", xaxis: { range: [-0.5, end - 0.5] }, yaxis: { minallowed: 0, maxallowed: 100 }, breaks,
          shapes: bands.map(([from, to, phase]) => ({
            type: "rect", xref: "x", yref: "paper", x0: from - 0.5, x1: to - 0.5, y0: 0, y1: 1, layer: "below", line: { width: 0 },
            fillcolor: fade(tint(phases[phase].colour), phases[phase].shade),
          })),
        });
        // names of the segments that are wide enough for them
        const annotations = bands
          .filter(([from, to, phase]) => ((to - from) / end) * (width - 60) > WIDE * phases[phase].name.length)
          .map(([from, to, phase]) => ({
            xref: "x", yref: "paper", x: (from + to) / 2 - 0.5, y: 1, yanchor: "bottom", showarrow: false,
            text: plain(phases[phase].name), font: { size: 11, color: read("soft") },
          }));
        return { data, layout: { ...layout, annotations, margin: { l: 44, r: 12, t: 22, b: 40 } } };
      },
    });
    const legend = addLegend(Object.values(phases), "band");
    const shades = Object.values(phases).map(({ shade }) => Math.min(1, 2.5 * shade)); // small squares need more
    $$(".swatch", legend).forEach((swatch, i) => { swatch.style.opacity = shades[i]; });
    place.append(
      legend, addSwitches(there, hidden, () => spoil(chart)), chart,
      addNumbers(`accuracy (%) by segment, ${name}`, () => [
        ["method", ...bands.map(([from, to, phase]) => `${from} to ${to - 1}: ${phases[phase].name}`)],
        there.map(([id, look]) => [look.name, ...curves[id].segments.map((each) => number(each))]),
      ]));
  }

  return { fillStreams, addStream };
})();
