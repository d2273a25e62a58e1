(() => {
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
      if (a === null || b === null) return (a === null) - (b === null); // missing numbers come last in both directions
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
})();
