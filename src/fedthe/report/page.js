"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const $ = (selector, within = document) => within.querySelector(selector);
  const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];
  root.classList.add("scripted");

  // Words. Whatever a user has named goes into the page as text, never as markup.

  function make(tag, properties = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name === "class") element.className = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  // Plotly reads some tags in its texts.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const cut = (text, length) => (text.length > length ? text.slice(0, length - 1) + "…" : text);

  function wrap(text, width) {
    const lines = [""];
    for (const word of text.split(" ")) {
      const last = lines[lines.length - 1];
      if (last && last.length + 1 + word.length > width) lines.push(word);
      else lines[lines.length - 1] = last ? last + " " + word : word;
    }
    return lines.slice(0, 4).map((line) => plain(cut(line, width + 4))).join("<br>");
  }

  // As Python rounds, which writes the table of results: what lies exactly between two goes to the even one, not up.
  function number(value, digits = 1) {
    if (value === null || value === undefined) return "–";
    const said = value.toFixed(digits);
    const between = (Math.abs(value) * 2 ** (digits + 1)) % 2 === 1;
    const last = Number(said.slice(-1));
    return between && last % 2 ? said.slice(0, -1) + (last - 1) : said;
  }

  const known = (values) => values.filter((value) => value !== null && value !== undefined);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const count = (n, noun, nouns = noun + "s") => `${n} ${n === 1 ? noun : nouns}`;
  const className = (run, index) => run.classes[index] ?? `class ${index}`;

  // Colours, as the theme has them

  const probe = make("span", { hidden: true });
  document.body.append(probe);

  function read(name) {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  }

  function luminance(rgb) {
    const parts = rgb.map((part) => {
      const share = part / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  }

  const split = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const readParts = (name) => read(name).match(/[\d.]+/g).slice(0, 3).map(Number);
  const isDark = () => luminance(readParts("paper")) < 0.2;

  // The colours are made for white paper: on a dark page, the dark ones among them are mixed with white, the darkest most, so
  // that two which differ in lightness still do.
  function tint(hex) {
    if (!isDark()) return hex;
    let rgb = split(hex);
    const goal = luminance(rgb) < 0.1 ? 0.45 : 0.2;
    if (luminance(rgb) < goal) rgb = rgb.map((part) => (part * 255) / Math.max(...rgb, 1) * 0.9 + part * 0.1); // keeps the hue
    while (luminance(rgb) < goal) rgb = rgb.map((part) => Math.min(255, part + 0.12 * (255 - part) + 1));
    return `rgb(${rgb.map(Math.round).join(",")})`;
  }

  const fade = (colour, share) =>
    `rgba(${(colour[0] === "#" ? split(colour) : colour.match(/[\d.]+/g).slice(0, 3)).join(",")},${share})`;
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const SYMBOLS = ["circle", "diamond", "square", "triangle-up"]; // and so are swatches in page.css
  const CLASSES = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac",
    "#2f5d8a", "#b8641a", "#3b7a33", "#a83a3c", "#4f8f8b", "#b3942b", "#80527a", "#c76a75", "#6e5140", "#8a817c"];

  // Charts are drawn when they come into sight, and again when the theme, their width or a choice changes.

  const charts = new Map(); // of every element: what to draw, whether it is seen, and whether that is drawn
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

  const redraw = () => [...charts.keys()].forEach(spoil);

  // It is large: the page is there, and can be used, before it runs.
  function loadPlotly() {
    if (window.Plotly) return;
    document.head.append(make("script", {}, $("#plotly").textContent));
    [...charts.keys()].forEach(refresh);
  }

  window.addEventListener("load", () => requestAnimationFrame(() => setTimeout(loadPlotly)));
  window.addEventListener("beforeprint", () => {
    loadPlotly();
    root.dataset.theme = "light";
    root.classList.add("printing");
    $$(".swatch").forEach(paintSwatch);
    for (const details of $$("details.numbers")) details.hidden = !details.open;
    [...charts.keys()].forEach(draw);
  });
  window.addEventListener("afterprint", () => {
    for (const details of $$("details.numbers")) details.hidden = false;
    root.classList.remove("printing");
    applyTheme();
  });

  // Theme

  const theme = $("#theme");

  function applyTheme() {
    if (theme.value === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme.value;
    $$(".swatch").forEach(paintSwatch);
    redraw();
  }

  function recall() {
    try {
      return localStorage.getItem("fedthe-theme");
    } catch {
      return null; // some browsers allow no storage to a file
    }
  }

  function remember(choice) {
    try {
      localStorage.setItem("fedthe-theme", choice);
    } catch {
      // then the choice holds for now
    }
  }

  if (["light", "dark"].includes(recall())) theme.value = recall();
  theme.addEventListener("change", () => {
    remember(theme.value);
    applyTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);

  // The table of results

  function sortBy(table, column, ascending) {
    const heads = $$("thead th", table);
    const key = (row) => {
      const cell = row.cells[column];
      const value = cell.dataset[table.dataset.show];
      return value === undefined ? (cell.matches("th, .words") ? cell.textContent : null) : Number(value);
    };
    const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
    const rows = $$("tbody tr", table).map((row) => [key(row), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null); // what is missing is last in both directions
      return ascending ? compare(a, b) : compare(b, a);
    });
    for (const head of heads) head.removeAttribute("aria-sort");
    heads[column].setAttribute("aria-sort", ascending ? "ascending" : "descending");
    $("tbody", table).append(...rows.map(([, row]) => row));
  }

  const results = $("#results-table");
  if (results) {
    const heads = $$("thead th", results);
    heads.forEach((head, column) => $("button", head).addEventListener("click", () => {
      const sorted = head.getAttribute("aria-sort");
      sortBy(results, column, sorted ? sorted === "descending" : head.matches(".words, .least"));
    }));
    $("#shown-number").addEventListener("change", (event) => {
      results.dataset.show = event.target.value;
      const column = heads.findIndex((head) => head.hasAttribute("aria-sort"));
      if (column >= 0) sortBy(results, column, heads[column].getAttribute("aria-sort") === "ascending");
    });
  }

  // Tables that are wider than the page say so, and fade at the edge behind which there is more

  const fits = (region) => {
    region.classList.toggle("wide", region.scrollWidth > region.clientWidth + 1);
    region.classList.toggle("end", region.scrollLeft + region.clientWidth >= region.scrollWidth - 2);
  };
  const regions = new ResizeObserver((entries) => entries.forEach(({ target }) => fits(target)));

  function watchRegion(region) {
    regions.observe(region);
    region.addEventListener("scroll", () => fits(region), { passive: true });
    return region;
  }

  $$(".scroll").forEach(watchRegion);

  // What sections are made of

  function choose(label, options, change, value) {
    const select = make("select", {}, ...options.map(([id, name]) => make("option", { value: id }, name)));
    if (value !== undefined) select.value = value;
    select.addEventListener("change", () => change(select.value));
    return [make("label", { class: "control" }, label + " ", select), select];
  }

  function makeTable(caption, heads, rows, label) {
    return watchRegion(make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label ?? caption },
      make("table", {},
        make("caption", {}, make("span", {}, caption)),
        make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
        make("tbody", {}, ...rows.map(([first, ...rest]) =>
          make("tr", {}, make("th", { scope: "row" }, first), ...rest.map((cell) => make("td", {}, cell))))))));
  }

  // Tables of what a chart shows, made when somebody opens them
  function addNumbers(caption, fill) {
    const details = make("details", { class: "numbers" }, make("summary", {}, `The numbers: ${caption}`));
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(makeTable(caption, ...fill()));
    });
    return details;
  }

  function paintSwatch(swatch) {
    const colour = tint(swatch.dataset.colour);
    if (swatch.classList.contains("line")) swatch.style.borderTop = `3px ${swatch.dataset.dash} ${colour}`;
    else swatch.style.background = colour;
  }

  function addSwatch(look, kind) {
    const turn = look.turn % 4;
    const dash = ["solid", "dashed", "dotted", "dashed"][turn];
    const swatch = make("span", { class: `swatch ${kind === "point" ? SYMBOLS[turn] : kind}`, "data-colour": look.colour, "data-dash": dash });
    paintSwatch(swatch);
    return swatch;
  }

  const addLegend = (looks, kind) =>
    make("ul", { class: "legend" }, ...looks.map((look) => make("li", {}, addSwatch(look, kind), look.name)));

  // A legend whose names take lines away from the charts of a section
  function addSwitches(looks, hidden, change) {
    return make("ul", { class: "legend" }, ...looks.map(([id, look]) => {
      const button = make("button", { type: "button", "aria-pressed": "true" }, addSwatch(look, "line"), look.name);
      button.addEventListener("click", () => {
        if (hidden.has(id)) hidden.delete(id);
        else hidden.add(id);
        button.setAttribute("aria-pressed", String(!hidden.has(id)));
        change();
      });
      return make("li", {}, button);
    }));
  }

  const addPanels = (panels) =>
    make("div", { class: "panels" }, ...panels.map(({ title, more, ...chart }) =>
      make("figure", {}, make("figcaption", {}, title, more ? make("span", {}, ` ${more}`) : null), addChart(chart))));

  const spoilWithin = (element) => $$(".chart", element).forEach(spoil);

  // ID against OOD

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
        label: `Scatter of ${count(points.length, "method")}: percent right on the original test against the mean of all other tests.`,
        height,
        build: (width) => drawTrade(points, width, height),
      }),
      addLegend(points.map(({ look }) => look), "point"),
      addNumbers(`original, and the mean of ${others.join(", ")}`, () => [
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
        xaxis: { range: ranges[0], title: { text: "percent right on the original test", standoff: 8 }, automargin: false },
        yaxis: { range: ranges[1], title: { text: "mean of all other tests", standoff: 8 }, automargin: false },
      },
    };
  }

  // Where the middle of the label of every point is, from the point: beside it, or farther away with a line to it, so that it
  // covers no other label and no point. None where there is no such place; the legend names all.
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

  function fillSeverity(run, body) {
    if (!run.severity) return false;
    const tests = Object.keys(run.tests);
    const levels = tests.map((test) => Number(test.replace("severity", "")));
    const hidden = new Set();
    const lines = Object.entries(run.methods).filter(([id]) => run.scores[id]);
    if (!lines.length) return false;
    const curves = lines.map(([id, look]) => ({
      id, look, x: levels, y: tests.map((test) => run.scores[id][test]?.mean ?? null), std: tests.map((test) => run.scores[id][test]?.std ?? null),
    }));
    body.append(
      addChart({
        label: `Lines of percent right over corruption severity ${levels[0]} to ${levels[levels.length - 1]}, for ${count(lines.length, "method")}.`,
        height: 400,
        build: () => drawLines(curves, hidden, { x: "severity", y: "percent right", markers: true, xaxis: { dtick: 1 } }),
      }),
      addSwitches(lines, hidden, () => spoilWithin(body)));
    return true;
  }

  // Lines: learning curves, losses, severities, interpolations

  function drawLines(curves, hidden, { x, y, xaxis = {}, yaxis = {}, markers = false, digits = 1, shapes = [] }) {
    const shown = curves.filter(({ id }) => !hidden.has(id));
    const data = [];
    if (shown.length <= 6) {
      for (const { look, x: at, y: values, std } of shown) {
        if (!std || std.some((each) => each === null) || std.every((each) => each === 0)) continue;
        data.push({
          type: "scatter", mode: "lines", hoverinfo: "skip", fill: "toself", fillcolor: fade(tint(look.colour), 0.12), line: { width: 0 },
          x: [...at, ...[...at].reverse()],
          y: [...values.map((value, i) => value + std[i]), ...values.map((value, i) => value - std[i]).reverse()],
        });
      }
    }
    for (const { look, x: at, y: values, std } of shown) {
      data.push({
        type: "scatter", mode: markers ? "lines+markers" : "lines", x: at, y: values,
        line: { color: tint(look.colour), width: 2, dash: DASHES[look.turn % 4] }, marker: { size: 6 },
        hovertext: at.map((each, i) =>
          `${plain(cut(look.name, 60))}<br>${x} ${each}: ${number(values[i], digits)}${std && std[i] !== null ? ` ± ${number(std[i], digits)}` : ""}`),
        hoverinfo: "text",
      });
    }
    return { data, layout: { shapes, xaxis: { title: { text: x, standoff: 8 }, ...xaxis }, yaxis: { title: { text: y, standoff: 8 }, ...yaxis } } };
  }

  // Rounds are whole numbers, and where there is one, it is in the middle.
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
        label: `Learning curves on the test ${name}: percent right over rounds, for ${count(there.length, "method")}.`,
        height: 250,
        build: () => drawLines(
          there.filter(([id]) => curveOf(id, test)).map(([id, look]) => {
            const { rounds: x, mean: y, std } = curveOf(id, test);
            return { id, look, x, y, std };
          }), hidden, { x: "rounds", y: "percent right", markers: true, xaxis: countRounds(rounds) }),
      }))));
    body.append(addSwitches(there, hidden, () => spoilWithin(charts)), charts, addNumbers("percent right after so many rounds", () => [
      ["method", "test", ...rounds.map(String)],
      there.flatMap(([id, look]) => Object.entries(tests).filter(([test]) => curveOf(id, test)).map(([test, { name }]) => {
        const curve = curveOf(id, test);
        return [look.name, name, ...rounds.map((round) => number(curve.mean[curve.rounds.indexOf(round)]))];
      })),
    ]));
  }

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
      label: `Lines of the mean local loss over rounds, for ${count(lines.length, "training")}.`,
      height: 320,
      build: () => drawLines(
        run.losses.map((line, i) => ({ id: String(i), look: lines[i][1], x: line.rounds, y: line.losses })), hidden,
        { x: "round", y: "mean local loss", digits: 3, markers: longest <= 10, xaxis: countRounds(run.losses.flatMap(({ rounds }) => rounds)), yaxis: log ? { type: "log", tickvals: STEPS, ticktext: STEPS.map(String) } : {} }),
    });
    const last = (values) => values[values.length - 1];
    body.append(
      make("h3", {}, "Loss while training"),
      make("p", { class: "what" }, `The mean local loss of each training after every round, the mean over seeds${log ? "; the scale is logarithmic" : ""}.`),
      addSwitches(lines, hidden, () => spoil(chart)), chart,
      addNumbers("mean local loss", () => [
        ["training", "first round", "halfway", "last round"],
        run.losses.map(({ name, losses }) => [name, losses[0], losses[Math.floor((losses.length - 1) / 2)], last(losses)]
          .map((each) => (typeof each === "string" ? each : number(each, 3)))),
      ]));
  }

  // Per client

  function fillClients(run, body) {
    const seeds = Object.keys(run.clients);
    if (!seeds.length) return false;
    const methods = Object.entries(run.methods).filter(([id]) => seeds.some((seed) => run.clients[seed].scores[id]));
    const state = { seed: seeds[0], method: pickMethod(run, methods.map(([id]) => id)), client: 0 };
    const pictures = make("div");
    const panel = make("div", { class: "panel", id: "client" });
    const said = make("div", { "aria-live": "polite" });
    const numbers = make("div", { class: "columns" });
    panel.append(said, numbers);
    const [clientLabel, clientSelect] = choose("Client", [], (value) => pick(Number(value)));

    function pick(client) {
      state.client = client;
      clientSelect.value = client;
      spoilWithin(pictures);
      sayClient(run, state, said, numbers);
    }

    function fillSeed() {
      dropCharts(pictures);
      const clients = run.clients[state.seed];
      const n = countClients(clients);
      clientSelect.replaceChildren(...Array.from({ length: n }, (_, k) => make("option", { value: k }, String(k))));
      pictures.replaceChildren(...drawClients(run, state, n, pick));
      pick(Math.min(state.client, n - 1));
    }

    const [seedLabel] = choose("Seed", seeds.map((seed) => [seed, seed]), (seed) => {
      state.seed = seed;
      fillSeed();
    });
    const [methodLabel] = choose("Method", methods.map(([id, { name }]) => [id, name]), (method) => {
      state.method = method;
      fillSeed();
    }, state.method);
    body.append(make("div", { class: "controls" }, seeds.length > 1 ? seedLabel : null, methods.length ? methodLabel : null, clientLabel), pictures, panel);
    fillSeed();
    return true;
  }

  // The methods this package is about come first where a section shows one at a time
  const pickMethod = (run, ids) => ["fedthe_plus", "fedthe"].find((id) => ids.includes(id)) ?? Object.keys(run.methods).find((id) => ids.includes(id));

  function countClients({ mix, scores }) {
    const lengths = Object.values(scores).flatMap((tests) => Object.values(tests).map((values) => values.length));
    return Math.max(mix.length, ...lengths);
  }

  function drawClients(run, state, n, pick) {
    const clients = run.clients[state.seed];
    const scores = clients.scores[state.method] ?? {};
    const tests = Object.keys(run.tests).filter((test) => scores[test]);
    const rowHeight = n <= 25 ? 26 : Math.max(8, Math.min(16, 900 / n));
    const tilted = () => document.body.clientWidth < 900 || tests.length > 10; // the names of tests
    const margin = (stacked) => ({ l: 50, r: 8, t: stacked ? 8 : tilted() ? 100 : 64, b: 36 });
    const height = Math.max(220, rowHeight * n + 100);
    const rows = Array.from({ length: n }, (_, k) => k);
    const ticks = rows.filter((k) => k % (n <= 30 ? 1 : 5) === 0);
    const yaxis = { range: [n - 0.5, -0.5], tickvals: ticks, ticktext: ticks.map(String), automargin: false, showgrid: false, title: { text: "client", standoff: 4 } };
    const frame = (from, to) => [{
      type: "rect", xref: "x", yref: "y", x0: from, x1: to, y0: state.client - 0.5, y1: state.client + 0.5,
      line: { color: read("ink"), width: 2 },
    }];
    const parts = [];
    if (tests.length) {
      const { name } = run.methods[state.method];
      const values = rows.map((k) => tests.map((test) => scores[test][k] ?? null));
      parts.push(make("figure", {},
        make("figcaption", {}, `Percent right, ${name}`),
        addChart({
          label: `Heat map of percent right of ${name}: ${count(n, "client")} by ${count(tests.length, "test")}, seed ${state.seed}.`,
          height,
          click: (point) => pick(Math.round(point.y)),
          build: (width) => drawHeat({
            values, margin: margin(), yaxis, shapes: frame(-0.5, tests.length - 0.5), tilted: tilted(),
            columns: tests.map((test) => run.tests[test].name),
            wide: (width - 58) / tests.length,
            numbers: n <= 25,
            hover: (k, j) => `client ${k}, ${plain(run.tests[tests[j]].name)}<br>${values[k][j] === null ? "has no such test" : number(values[k][j]) + " percent right"}`,
          }),
        })));
    }
    if (clients.mix.length) parts.push(addMix(run, clients.mix, { height, margin, yaxis, frame, pick, n, state }));
    return [make("div", { class: parts.length > 1 ? "pair" : "" }, ...parts)];
  }

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

  // The colour of a value on a scale of three
  function mixScale(scale, value, [low, high]) {
    const at = 2 * Math.min(1, Math.max(0, (value - low) / (high - low || 1)));
    const [from, to] = at <= 1 ? [scale[0], scale[1]] : [scale[1], scale[2]];
    return from.map((part, i) => part + (to[i] - part) * (at <= 1 ? at : at - 1));
  }

  const pickInk = (rgb) => (luminance(rgb) > 0.179 ? "#000000" : "#ffffff");

  function addMix(run, mix, { height, margin, yaxis, frame, pick, n, state }) {
    const groups = groupClasses(run, mix);
    const total = Math.max(1, ...mix.map((row) => row.reduce((sum, rows) => sum + rows, 0)));
    const rows = Array.from({ length: n }, (_, k) => k);
    return make("figure", {},
      make("figcaption", {}, "Class mix"),
      addChart({
        label: `Stacked bars of how many rows of each of ${count(mix[0].length, "class", "classes")} every client holds, seed ${state.seed}.`,
        height,
        click: (point) => pick(Math.round(point.y)),
        build: () => ({
          data: groups.map(({ name, colour, of }) => ({
            type: "bar", orientation: "h", y: rows, x: rows.map((k) => (mix[k] ? of(mix[k]) : 0)),
            marker: { color: tint(colour), line: { width: 0 } }, hoverinfo: "text", textposition: "none",
            hovertext: rows.map((k) => `client ${k}<br>${plain(cut(name, 60))}: ${count(mix[k] ? of(mix[k]) : 0, "row")}`),
          })),
          layout: {
            margin: margin(document.body.clientWidth <= 600), barmode: "stack", bargap: n <= 25 ? 0.18 : 0, shapes: frame(0, total), yaxis,
            xaxis: { title: { text: "rows", standoff: 6 }, range: [0, total], automargin: false, nticks: 5 },
          },
        }),
      }),
      addLegend(groups.map(({ name, colour }) => ({ name: cut(name, 40), colour, turn: 0 })), "square"));
  }

  // As many as there are colours: the rarest classes are shown as one.
  function groupClasses(run, mix) {
    const totals = mix[0].map((_, c) => mix.reduce((sum, row) => sum + row[c], 0));
    const order = totals.map((_, c) => c).sort((a, b) => totals[b] - totals[a]);
    const alone = new Set(totals.length <= CLASSES.length ? order : order.slice(0, CLASSES.length - 1));
    const rest = order.filter((c) => !alone.has(c));
    const groups = totals.map((_, c) => c).filter((c) => alone.has(c))
      .map((c, i) => ({ name: className(run, c), colour: CLASSES[i], of: (row) => row[c] }));
    if (rest.length) {
      groups.push({ name: `${rest.length} rarer classes`, colour: CLASSES[CLASSES.length - 1], of: (row) => rest.reduce((sum, c) => sum + row[c], 0) });
    }
    return groups;
  }

  function sayClient(run, state, said, numbers) {
    const clients = run.clients[state.seed];
    const look = run.methods[state.method] ?? { name: "" };
    const scores = clients.scores[state.method] ?? {};
    const heads = clients.heads[state.method];
    const k = state.client;
    const tests = Object.entries(run.tests).filter(([test]) => scores[test]);
    const average = known(tests.map(([test]) => scores[test][k]));
    said.replaceChildren(
      make("h3", {}, `Client ${k}, seed ${state.seed}`),
      clients.mix[k] ? make("p", {}, sayMix(run, clients.mix[k])) : "",
      state.method === undefined ? "" : make("p", {}, average.length ? `${look.name} is right on ${number(mean(average))} percent, the average over its tests.` : `There is nothing of ${look.name} for this client.`));
    const own = heads
      ? [["global head", (test) => heads[test]?.global?.[k]], ["personal head", (test) => heads[test]?.personal?.[k]],
        [`ensemble (${look.name})`, (test) => scores[test][k]]]
      : [[look.name, (test) => scores[test][k]]];
    const parts = [];
    if (tests.length) parts.push(makeTable(`${look.name} on client ${k}, percent right`, ["test", ...own.map(([name]) => name)],
      tests.map(([test, { name }]) => [name, ...markBest(own.map(([, get]) => get(test)), own.length > 1)])));
    const methods = Object.entries(run.methods).filter(([id]) => clients.scores[id]);
    if (methods.length > 1) {
      const all = Object.entries(run.tests).filter(([test]) => methods.some(([id]) => clients.scores[id][test]));
      const columns = all.map(([test]) => markBest(methods.map(([id]) => clients.scores[id][test]?.[k]), true));
      parts.push(makeTable(`All methods on client ${k}, percent right`, ["method", ...all.map(([, { name }]) => name)],
        methods.map(([, { name }], i) => [name, ...columns.map((column) => column[i])])));
    }
    numbers.replaceChildren(...parts);
  }

  // As they are seen; nobody where all look the same
  function markBest(values, mark) {
    const best = number(Math.max(...known(values)));
    const differ = known(values).some((value) => number(value) !== best);
    return values.map((value) => number(value)).map((said) => (mark && differ && said === best ? make("b", {}, said) : said));
  }

  function sayMix(run, rows) {
    const total = rows.reduce((sum, each) => sum + each, 0);
    const held = rows.map((each, c) => [each, c]).filter(([each]) => each > 0).sort(([a], [b]) => b - a);
    const first = held.slice(0, 5).map(([each, c]) => `${each} of ${className(run, c)}`);
    const rest = held.slice(5);
    if (rest.length) first.push(`${rest.reduce((sum, [each]) => sum + each, 0)} of ${count(rest.length, "other class", "other classes")}`);
    const listed = first.length > 1 ? `${first.slice(0, -1).join(", ")} and ${first[first.length - 1]}` : first.join("");
    return `It holds ${count(total, "row")} of ${held.length} of ${count(rows.length, "class", "classes")}: ${listed}.`;
  }

  // The weight of the personal head

  function fillWeights(run, body) {
    const methods = Object.keys(run.methods).filter((id) => run.weights[id]);
    if (!methods.length) return false;
    const place = make("div");
    const fill = (method) => {
      dropCharts(place);
      const weights = run.weights[method];
      const tests = Object.entries(run.tests).filter(([test]) => weights[test]);
      const high = Math.max(...tests.flatMap(([test]) => weights[test].shares));
      place.replaceChildren(
        addPanels(tests.map(([test, look]) => ({
          title: look.name,
          more: `mean ${number(weights[test].mean, 2)}`,
          label: `Histogram of the weight of the personal head on the test ${look.name}; its mean is ${number(weights[test].mean, 2)}.`,
          height: 200,
          build: () => drawWeights(weights[test], look, high),
        }))),
        addNumbers("percent of samples by the weight of the personal head", () => [
          ["test", "mean", "0 to 0.2", "0.2 to 0.4", "0.4 to 0.6", "0.6 to 0.8", "0.8 to 1"],
          tests.map(([test, { name }]) => [name, number(weights[test].mean, 2), ...[0, 1, 2, 3, 4].map((fifth) => number(100 * sumFifth(weights[test].shares, fifth)))]),
        ]));
    };
    const first = pickMethod(run, methods);
    const [label] = choose("Method", methods.map((id) => [id, run.methods[id].name]), fill, first);
    body.append(make("div", { class: "controls" }, label), place);
    fill(first);
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
        hovertext: edges.map((edge, i) => `${edge.toFixed(3)} to ${(edges[i + 1] ?? 1).toFixed(3)}: ${number(100 * (shares[i] ?? shares[i - 1]))} percent`),
      }],
      layout: {
        shapes: [{ type: "line", x0: average, x1: average, y0: 0, y1: 1, yref: "paper", line: { color: read("ink"), width: 1.5, dash: "dot" } }],
        xaxis: { range: [0, 1], dtick: 0.25, title: { text: "1 - e", standoff: 6 } },
        yaxis: { range: [0, Math.sqrt(Math.max(5, 110 * high))], tickvals: ticks.map(Math.sqrt), ticktext: ticks.map((percent) => `${percent} %`) },
      },
    };
  }

  // Examples

  const LONG = 40; // letters of a name

  function fillExamples(run, body) {
    if (!run.examples.length) return false;
    const answered = Object.keys(run.methods).filter((id) => run.examples.some(({ answers }) => id in answers));
    const place = make("div");
    const fill = (method) => {
      place.replaceChildren(...Object.entries(run.tests).flatMap(([test, { name }]) => {
        const those = run.examples.filter((example) => example.test === test && method in example.answers);
        return those.length ? [make("h3", {}, name), make("ul", { class: "examples" }, ...those.map((example) => showExample(run, method, example)))] : [];
      }));
    };
    const first = pickMethod(run, answered);
    const [label] = choose("Method", answered.map((id) => [id, run.methods[id].name]), fill, first);
    body.append(make("div", { class: "controls" }, label), place);
    fill(first);
    return true;
  }

  // A long name is cut; all of it is there for who points at it.
  function nameClass(run, index) {
    const name = className(run, index);
    return make("span", { title: name.length > LONG ? name : null }, cut(name, LONG));
  }

  function showExample(run, method, { image, label, client, seed, answers, heads, weights }) {
    const said = heads[method]
      ? [["global head", heads[method].global], ["personal head", heads[method].personal], ["ensemble", answers[method]]]
      : [[run.methods[method].name, answers[method]]];
    return make("li", {},
      make("img", { src: image, alt: `a sample of ${cut(className(run, label), LONG)}`, width: 64, height: 64 }),
      make("div", { class: "words" },
        make("p", {}, make("strong", {}, nameClass(run, label)), make("span", { class: "soft" }, ` · client ${client}, seed ${seed}`)),
        make("ul", {}, ...said.filter(([, answer]) => answer !== undefined).map(([who, answer]) => {
          const right = answer === label;
          return make("li", {}, `${who} `, make("span", { class: right ? "right" : "wrong" }, ...(right ? ["✓ right"] : ["✗ wrong: ", nameClass(run, answer)])));
        })),
        method in weights ? make("p", { class: "soft" }, `personal head counts ${number(weights[method], 2)}`) : ""));
  }

  // Figures

  const OURS = "#d62728";
  const FIGURES = { "alpha-beta": addAlphaBeta, "interpolation-": addInterpolation, "curves-": addFigureCurves };

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

  function addAlphaBeta({ tests, data: { alpha, beta, accuracy } }, place) {
    const there = Object.entries(tests).filter(([test]) => accuracy[test]);
    const own = [beta.indexOf(0.1), alpha.indexOf(0.1)]; // what the method uses
    place.append(
      make("p", { class: "what" }, "Percent right; every panel has its own scale. Framed: what the method uses."),
      addPanels(there.map(([test, { name }]) => {
        const values = accuracy[test].mean;
        const all = known(values.flat());
        return {
          title: name,
          label: `Heat map of percent right on the test ${name} by alpha and beta, from ${number(Math.min(...all))} to ${number(Math.max(...all))}.`,
          height: 270,
          build: (width) => drawHeat({
            values, columns: beta.map(String), wide: (width - 60) / beta.length, numbers: true, range: [Math.min(...all), Math.max(...all)],
            margin: { l: 50, r: 10, t: 8, b: 42 },
            xaxis: { side: "bottom", tickangle: 0, title: { text: "beta", standoff: 6 } },
            yaxis: { tickvals: alpha.map((_, i) => i), ticktext: alpha.map(String), title: { text: "alpha", standoff: 6 }, showgrid: false },
            shapes: own.includes(-1) ? [] : [{
              type: "rect", x0: own[0] - 0.5, x1: own[0] + 0.5, y0: own[1] - 0.5, y1: own[1] + 0.5, line: { color: tint(OURS), width: 2.5 },
            }],
            hover: (i, j) => `alpha ${alpha[i]}, beta ${beta[j]}<br>${number(values[i][j], 2)} percent right`,
          }),
        };
      })),
      addNumbers("percent right by alpha and beta", () => [
        ["test", "alpha", ...beta.map((each) => `beta ${each}`)],
        there.flatMap(([test, { name }]) => alpha.map((each, i) => [name, String(each), ...accuracy[test].mean[i].map((value) => number(value))])),
      ]));
  }

  function addInterpolation({ tests, data: { e, shared, best, fedthe } }, place) {
    const there = Object.entries(tests).filter(([test]) => shared[test]);
    const looks = [
      ["shared", { name: "one e for all clients", colour: "#0072b2", turn: 0 }],
      ["best", { name: "every client's best e (needs test labels)", colour: "#666666", turn: 1 }],
      ["fedthe", { name: "FedTHE (an e for every sample)", colour: OURS, turn: 0 }],
    ];
    const hidden = new Set();
    const charts = addPanels(there.map(([test, { name }]) => {
      const flat = (value) => e.map(() => value);
      const values = { shared: shared[test].mean, best: flat(best[test].mean), fedthe: flat(fedthe[test].mean) };
      const peak = e[values.shared.indexOf(Math.max(...values.shared))];
      return {
        title: name,
        more: `best one e ${peak}`,
        label: `Percent right on the test ${name} over e from 0, personal, to 1, global; best at ${peak}. Every client's own best e: ${number(best[test].mean)}. FedTHE: ${number(fedthe[test].mean)}.`,
        height: 250,
        build: () => drawLines(
          looks.map(([id, look]) => ({ id, look, x: e, y: values[id], std: id === "shared" ? shared[test].std : undefined })), hidden,
          { x: "e", y: "percent right", xaxis: { range: [0, 1] } }),
      };
    }));
    place.append(make("p", { class: "what" }, "At e = 0 only the personal one answers, at 1 only the global one."),
      addSwitches(looks, hidden, () => spoilWithin(charts)), charts,
      addNumbers("percent right by e", () => [
        ["test", ...e.map((each) => `e ${each}`), "every client's best e", "FedTHE"],
        there.map(([test, { name }]) => [name, ...shared[test].mean.map((value) => number(value)), number(best[test].mean), number(fedthe[test].mean)]),
      ]));
  }

  // All together

  const FILLS = { trade: fillTrade, severity: fillSeverity, clients: fillClients, curves: fillCurves, weights: fillWeights, examples: fillExamples };

  function showRun(run) {
    for (const [id, fill] of Object.entries(FILLS)) {
      const section = document.getElementById(id);
      if (!section) continue;
      const body = $(".drawn", section);
      dropCharts(body);
      body.replaceChildren();
      if (DATA.runs.length > 1) $(".of-run", section).textContent = `Run: ${run.name}`; // the choice is not on paper
      const there = fill(run, body);
      section.hidden = !there;
      $(`nav a[href="#${id}"]`).parentElement.hidden = !there;
    }
  }

  applyTheme();
  if (DATA.runs.length) showRun(DATA.runs[0]);
  if ($("#run")) $("#run").addEventListener("change", (event) => showRun(DATA.runs[Number(event.target.value)]));
  if ($("#figures")) fillFigures($("#figures .drawn"));
})();
