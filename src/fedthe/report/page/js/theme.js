(() => {
  window.addEventListener("beforeprint", () => {
    loadPlotly();
    root.dataset.theme = "light";
    root.classList.add("printing");
    paintSwatches();
    for (const details of $$("details.numbers")) details.hidden = !details.open;
    drawAll();
  });
  window.addEventListener("afterprint", () => {
    for (const details of $$("details.numbers")) details.hidden = false;
    root.classList.remove("printing");
    applyTheme();
  });

  const theme = $("#theme");

  function applyTheme() {
    if (theme.value === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme.value;
    paintSwatches();
    spoilWithin(document);
  }

  function recall() {
    try {
      return localStorage.getItem("fedthe-theme");
    } catch {
      return null; // some browsers give files no storage
    }
  }

  function remember(choice) {
    try {
      localStorage.setItem("fedthe-theme", choice);
    } catch {
      // the choice lasts until the page is closed
    }
  }

  if (["light", "dark"].includes(recall())) theme.value = recall();
  theme.addEventListener("change", () => {
    remember(theme.value);
    applyTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
  applyTheme();
})();
