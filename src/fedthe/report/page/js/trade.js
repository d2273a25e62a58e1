const { fillTrade } = (() => {
  const isWhole = (scores) => Object.values(scores).every((score) => score.mean !== null);
  const meanOfOthers = (scores) =>
    mean(Object.entries(scores).filter(([test]) => test !== "original").map(([, score]) => score.mean));

  function fillTrade(run, body) {
    const points = Object.entries(run.methods)
      .filter(([id]) => run.scores[id]?.original && Object.keys(run.scores[id]).length > 1 && isWhole(run.scores[id]))
      .map(([id, look]) => ({ look, x: run.scores[id].original.mean, y: meanOfOthers(run.scores[id]) }));
    if (!points.length) return false;
    const others = Object.entries(run.tests).filter(([id]) => id !== "original").map(([, test]) => test.name);
    const height = 460;
    body.append(
      addChart({
        label: `Scatter plot of ${count(points.length, "method")}: accuracy on the original test against mean accuracy on the other tests.`,
        height,
        build: (width) => drawTrade(points, width, height),
      }),
      addLegend(points.map(({ look }) => look), "point"),
      addNumbers(`accuracy (%) on original, and mean of ${others.join(", ")}`, () => [
        ["method", "original", "mean of the others"],
        points.map(({ look, x, y }) => [look.name, number(x), number(y)]),
      ]));
    return true;
  }

  function spread(values) {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const room = Math.max(1, 0.12 * (high - low));
    return [low - room, high + room];
  }

  function drawTrade(points, width, height) {
    const margin = { l: 52, r: 16, t: 10, b: 48 };
    const ranges = [spread(points.map(({ x }) => x)), spread(points.map(({ y }) => y))];
    const inside = [width - margin.l - margin.r, height - margin.t - margin.b];
    const places = points.map(({ x, y }) => [
      ((x - ranges[0][0]) / (ranges[0][1] - ranges[0][0])) * inside[0],
      (1 - (y - ranges[1][0]) / (ranges[1][1] - ranges[1][0])) * inside[1],
    ]);
    const names = points.map(({ look }) => cut(look.name, 24));
    const labels = placeLabels(places, names, inside);
    return {
      data: [{
        type: "scatter", mode: "markers",
        x: points.map(({ x }) => x), y: points.map(({ y }) => y),
        hovertext: points.map(({ look, x, y }) => `${plain(look.name)}<br>original ${number(x)}, others ${number(y)}`),
        hoverinfo: "text", cliponaxis: false,
        marker: {
          size: 12, color: points.map(({ look }) => tint(look.colour)), symbol: points.map(({ look }) => SYMBOLS[look.turn % 4]),
          line: { width: 1, color: read("paper") },
        },
      }],
      layout: {
        margin,
        annotations: labels.map((at, i) => at && {
          x: points[i].x, y: points[i].y, ax: at[0], ay: at[1], text: plain(names[i]), font: { size: 12 }, borderpad: 0, arrowhead: 0,
          arrowwidth: 1, arrowcolor: Math.hypot(...at) > 60 || Math.abs(at[1]) > 20 ? read("soft") : "rgba(0,0,0,0)", standoff: 6,
        }).filter(Boolean),
        xaxis: { range: ranges[0], title: { text: "accuracy on the original test (%)", standoff: 8 }, automargin: false },
        yaxis: { range: ranges[1], title: { text: "mean accuracy on the other tests (%)", standoff: 8 }, automargin: false },
      },
    };
  }

  // The offset of each label's centre from its point: beside it, or farther away with a line, where it covers no other label
  // and no point; null if there is no such place. The legend names all points.
  function placeLabels(places, names, [width, height]) {
    const pen = make("canvas").getContext("2d");
    pen.font = "12px system-ui, sans-serif"; // as in charts
    const taken = places.map(([x, y]) => [x - 6, y - 6, x + 6, y + 6]);
    const free = ([left, top, right, bottom], own) =>
      left >= 0 && top >= 0 && right <= width && bottom <= height &&
      taken.every((other, i) => i === own || left >= other[2] || right <= other[0] || top >= other[3] || bottom <= other[1]);
    return names.map((name, i) => {
      const [long, high] = [pen.measureText(name).width + 4, 16];
      const beside = [[1, 0], [-1, 0], [0, -1], [0, 1], [1, -1], [1, 1], [-1, -1], [-1, 1]];
      const ways = [0, 14, 28, 44, 62, 82].flatMap((more) => beside.map(([across, down]) =>
        [across * (long / 2 + (down ? 0 : 8) + more), down * (high / 2 + 8 + more)]));
      for (const [dx, dy] of ways) {
        const [x, y] = [places[i][0] + dx, places[i][1] + dy];
        const box = [x - long / 2, y - high / 2, x + long / 2, y + high / 2];
        if (free(box, i)) {
          taken.push(box);
          return [dx, dy];
        }
      }
      return null;
    });
  }

  return { fillTrade };
})();
