const { fillClients } = (() => {
  const CLASSES = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac",
    "#2f5d8a", "#b8641a", "#3b7a33", "#a83a3c", "#4f8f8b", "#b3942b", "#80527a", "#c76a75", "#6e5140", "#8a817c"];

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
      const there = Array.from({ length: n }, (_, k) => k).filter((k) => isTested(clients, k));
      pick(there.includes(state.client) ? state.client : there[0] ?? 0);
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

  const isTested = ({ scores }, k) =>
    Object.values(scores).some((tests) => Object.values(tests).some((values) => known([values[k]]).length > 0));

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
        make("figcaption", {}, `Accuracy (%), ${name}`),
        addChart({
          label: `Heat map of the accuracy of ${name}: ${count(n, "client")} by ${count(tests.length, "test")}, seed ${state.seed}.`,
          height,
          click: (point) => pick(Math.round(point.y)),
          build: (width) => drawHeat({
            values, margin: margin(), yaxis, shapes: frame(-0.5, tests.length - 0.5), tilted: tilted(),
            columns: tests.map((test) => run.tests[test].name),
            wide: (width - 58) / tests.length,
            numbers: n <= 25,
            hover: (k, j) => `client ${k}, ${plain(run.tests[tests[j]].name)}<br>${values[k][j] === null ? "no samples of this test" : `accuracy ${number(values[k][j])} %`}`,
          }),
        })));
    }
    if (clients.mix.length) parts.push(addMix(run, clients.mix, { height, margin, yaxis, frame, pick, n, state }));
    return [make("div", { class: parts.length > 1 ? "pair" : "" }, ...parts)];
  }

  function addMix(run, mix, { height, margin, yaxis, frame, pick, n, state }) {
    const groups = groupClasses(run, mix);
    const total = Math.max(1, ...mix.map((row) => row.reduce((sum, rows) => sum + rows, 0)));
    const rows = Array.from({ length: n }, (_, k) => k);
    return make("figure", {},
      make("figcaption", {}, "Class mix"),
      addChart({
        label: `Stacked bars of the rows of each of ${count(mix[0].length, "class", "classes")} that a client holds, seed ${state.seed}.`,
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

  // No more groups than colours: the rarest classes share one.
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
      state.method === undefined ? "" : make("p", {}, average.length ? `${look.name}: accuracy ${number(mean(average))} %, mean over its tests.` : `No results of ${look.name} for this client.`));
    const own = heads
      ? [["global head", (test) => heads[test]?.global?.[k]], ["personal head", (test) => heads[test]?.personal?.[k]],
        [`ensemble (${look.name})`, (test) => scores[test][k]]]
      : [[look.name, (test) => scores[test][k]]];
    const parts = [];
    if (tests.length) parts.push(makeTable(`${look.name} on client ${k}, accuracy (%)`, ["test", ...own.map(([name]) => name)],
      tests.map(([test, { name }]) => [name, ...markBest(own.map(([, get]) => get(test)), own.length > 1)])));
    const methods = Object.entries(run.methods).filter(([id]) => clients.scores[id]);
    if (methods.length > 1) {
      const all = Object.entries(run.tests).filter(([test]) => methods.some(([id]) => clients.scores[id][test]));
      const columns = all.map(([test]) => markBest(methods.map(([id]) => clients.scores[id][test]?.[k]), true));
      parts.push(makeTable(`All methods on client ${k}, accuracy (%)`, ["method", ...all.map(([, { name }]) => name)],
        methods.map(([, { name }], i) => [name, ...columns.map((column) => column[i])])));
    }
    numbers.replaceChildren(...parts);
  }

  // Bold the best as shown: ties after rounding are all bold, but not if all are tied
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

  return { fillClients };
})();
