const { plain, cut, wrap, number, known, mean, count, className } = (() => {
  // For Plotly, which interprets some tags.
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

  // Rounds as say_points does in Python: to two more digits first, then half to even.
  function number(given, digits = 1) {
    if (given === null || given === undefined) return "–";
    const value = Math.round(given * 10 ** (digits + 2)) / 10 ** (digits + 2);
    const said = value.toFixed(digits);
    const between = (Math.abs(value) * 2 ** (digits + 1)) % 2 === 1;
    const last = Number(said.slice(-1));
    return between && last % 2 ? said.slice(0, -1) + (last - 1) : said;
  }

  const known = (values) => values.filter((value) => value !== null && value !== undefined);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const count = (n, noun, nouns = noun + "s") => `${n} ${n === 1 ? noun : nouns}`;
  const className = (run, index) => run.classes[index] ?? `class ${index}`;

  return { plain, cut, wrap, number, known, mean, count, className };
})();
