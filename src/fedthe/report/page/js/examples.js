const { fillExamples } = (() => {
  const LONG = 40; // characters of a name

  function fillExamples(run, body) {
    if (!run.examples.length) return false;
    const answered = Object.keys(run.methods).filter((id) => run.examples.some(({ answers }) => id in answers));
    addMethodChoice(run, answered, body, (method) => Object.entries(run.tests).flatMap(([test, { name }]) => {
      const those = run.examples.filter((example) => example.test === test && method in example.answers);
      return those.length ? [make("h3", {}, name), make("ul", { class: "examples" }, ...those.map((example) => showExample(run, method, example)))] : [];
    }));
    return true;
  }

  // A long name is cut; its tooltip shows it in full.
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
          return make("li", {}, `${who} `, make("span", { class: right ? "right" : "wrong" }, ...(right ? ["✓ correct"] : ["✗ wrong: ", nameClass(run, answer)])));
        })),
        method in weights ? make("p", { class: "soft" }, `weight of the personal head ${number(weights[method], 2)}`) : ""));
  }

  return { fillExamples };
})();
