const { choose, makeTable, addNumbers, paintSwatches, addLegend, addSwitches, addPanels, pickMethod, addMethodChoice } = (() => {
  // A table wider than the page says so, and fades at the edge where it continues.
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

  function choose(label, options, change, value) {
    const select = make("select", {}, ...options.map(([id, name]) => make("option", { value: id }, name)));
    if (value !== undefined) select.value = value;
    select.addEventListener("change", () => change(select.value));
    return [make("label", { class: "control" }, label + " ", select), select];
  }

  function makeTable(caption, heads, rows) {
    return watchRegion(make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      make("table", {},
        make("caption", {}, make("span", {}, caption)),
        make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
        make("tbody", {}, ...rows.map(([first, ...rest]) =>
          make("tr", {}, make("th", { scope: "row" }, first), ...rest.map((cell) => make("td", {}, cell))))))));
  }

  // The numbers of a chart, filled in when first opened
  function addNumbers(caption, fill) {
    const details = make("details", { class: "numbers" }, make("summary", {}, `Numbers: ${caption}`));
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

  const paintSwatches = () => $$(".swatch").forEach(paintSwatch);

  function addSwatch(look, kind) {
    const turn = look.turn % 4;
    const dash = ["solid", "dashed", "dotted", "dashed"][turn];
    const swatch = make("span", { class: `swatch ${kind === "point" ? SYMBOLS[turn] : kind}`, "data-colour": look.colour, "data-dash": dash });
    paintSwatch(swatch);
    return swatch;
  }

  const addLegend = (looks, kind) =>
    make("ul", { class: "legend" }, ...looks.map((look) => make("li", {}, addSwatch(look, kind), look.name)));

  // A legend whose entries toggle lines
  function addSwitches(looks, hidden, change) {
    return make("ul", { class: "legend" }, ...looks.map(([id, look]) => {
      const button = make("button", { type: "button", "aria-pressed": String(!hidden.has(id)) }, addSwatch(look, "line"), look.name);
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

  // The method to show first
  const pickMethod = (run, ids) => [...DATA.ours, ...Object.keys(run.methods)].find((id) => ids.includes(id));

  // Show one method at a time: `fill` returns the elements to show
  function addMethodChoice(run, ids, body, fill) {
    const place = make("div");
    const show = (method) => {
      dropCharts(place);
      place.replaceChildren(...fill(method));
    };
    const first = pickMethod(run, ids);
    const [label] = choose("Method", ids.map((id) => [id, run.methods[id].name]), show, first);
    body.append(make("div", { class: "controls" }, label), place);
    show(first);
  }

  return { choose, makeTable, addNumbers, paintSwatches, addLegend, addSwitches, addPanels, pickMethod, addMethodChoice };
})();
