// --- sizes, numbers, elements; independent of reports ----------------------------------------------------------------

const UNITS = ["KiB", "MiB", "GiB", "TiB"];

/** A size as in Lowtide's `format_bytes`: two decimals, ties to even; the unit is selected after rounding. */
function formatBytes(bytes) {
  const sign = bytes < 0 ? "-" : "";
  const size = Math.abs(bytes);
  if (size < 1024) return `${sign}${size} B`;
  let factor = 1;
  for (const unit of UNITS) {
    factor *= 1024;
    const hundredths = roundEven((size * 100) / factor);
    if (hundredths < 102400 || unit === "TiB") return `${sign}${withDecimals(hundredths)} ${unit}`;
  }
  return "";
}

function roundEven(value) {
  const low = Math.floor(value);
  const rest = value - low;
  if (rest !== 0.5) return Math.round(value);
  return low % 2 === 0 ? low : low + 1;
}

function withDecimals(hundredths) {
  const rest = hundredths % 100;
  return `${(hundredths - rest) / 100}.${String(rest).padStart(2, "0")}`;
}

const signedBytes = (bytes) => (bytes > 0 ? "+" : "") + formatBytes(bytes);
const tickText = (bytes) => (bytes === 0 ? "0" : formatBytes(bytes).replace(".00 ", " "));
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
const count = (number) => number.toLocaleString("en-US");

function percent(part, whole) {
  const share = whole ? (100 * part) / whole : 0;
  return part > 0 && share < 0.05 ? "<0.1 %" : `${share.toFixed(1)} %`;
}

/** Round sizes from 0 to `top`: 1, 2 or 5 times a power of ten of a binary unit. */
function byteTicks(top, wanted) {
  let unit = 1;
  while (top >= unit * 1024 && unit < 2 ** 40) unit *= 1024;
  const rough = Math.max(top / unit / wanted, 1 / unit);
  const scale = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * scale).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let at = 0; at * step * unit <= top * 1.0001; at++) ticks.push(Math.round(at * step * unit));
  return ticks;
}

const byId = (id) => document.getElementById(id);

/** An element with attributes and children; text children are text, never markup. */
function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/** The fill of a role as CSS: its colour, and its texture as faint lines. */
function roleFill(style) {
  const lines = (angle) => `repeating-linear-gradient(${angle}deg, #ffffff4d 0 1px, transparent 1px 6px)`;
  const layers = { "": [], "/": [lines(135)], "\\": [lines(45)], x: [lines(45), lines(135)] }[style.texture];
  return { backgroundColor: style.color, backgroundImage: layers.join(",") || "none" };
}

const swatch = (style) => element("i", { class: "swatch", style: roleFill(style), "aria-hidden": "true" });

function makeTooltip(node) {
  const hide = () => { node.hidden = true; };
  const show = (x, y, ...children) => {
    node.replaceChildren(...children);
    node.hidden = false;
    const box = node.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth - 8 ? x - 16 - box.width : x + 16;
    node.style.left = `${Math.max(8, left)}px`;
    node.style.top = `${Math.max(8, Math.min(y + 14, innerHeight - box.height - 8))}px`;
  };
  return { show, hide };
}

/** Lines of a tooltip: one per role, with its bytes, largest first. */
function roleLines(pairs, styles) {
  const sorted = pairs.filter(([, bytes]) => bytes).sort((a, b) => b[1] - a[1]);
  return sorted.map(([role, bytes]) =>
    element("div", { class: "line" }, swatch(styles[role]), element("span", { class: "name" }, role),
      element("span", {}, formatBytes(bytes))));
}

function setUpTheme(button, redraw) {
  const dark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Use ${dark() ? "light" : "dark"} colours`); };
  button.hidden = false;
  button.addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; name(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  name();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
}
