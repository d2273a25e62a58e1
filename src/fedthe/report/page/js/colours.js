const { read, readParts, luminance, tint, fade, SYMBOLS } = (() => {
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

  // Colours are chosen for a white page. On a dark one, dark colours are lightened, the darkest most, so that they stay
  // distinguishable.
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
  const SYMBOLS = ["circle", "diamond", "square", "triangle-up"]; // page.css has a swatch for each

  return { read, readParts, luminance, tint, fade, SYMBOLS };
})();
