// Data, decoding, small pieces of page, colours: what every section shares.

const DATA = JSON.parse(document.getElementById("data").textContent);
const darkness = matchMedia("(prefers-color-scheme: dark)");
const CHOSEN = {}; // in the prompt shown before, section by section

// What an edge or a token can be coloured by; `own` metrics are added from the data.
const METRICS = {
  attention: { label: "attention", symbol: "α", meaning: "Weight of each key after the softmax; a row sums to 1." },
  value_weighted: {
    label: "value-weighted", symbol: "α‖ṽ‖",
    meaning: "Length of what each key writes into the residual stream, in its units.",
  },
  value_weighted_output_normalized: {
    label: "value-weighted, by output", symbol: "α‖ṽ‖/‖o‖",
    meaning: "Length of what each key writes, as a share of the length of the layer’s output.",
  },
  contribution: {
    label: "contribution", symbol: "|ĉ|",
    meaning: "Magnitude of each key’s share of the layer’s output, whether it gives or takes away.",
  },
  signed_contribution: {
    label: "signed contribution", symbol: "ĉ",
    meaning: "Each key’s share of the layer’s output. Blue gives, dotted orange takes away; all heads and keys of a query sum to 1.",
  },
  intra_head_contribution: {
    label: "intra-head", symbol: "č",
    meaning: "Each key’s share of its own head’s output. Blue gives, dotted orange takes away; a row sums to 1.",
  },
  relative_norm: {
    label: "relative norm", symbol: "‖ṽ‖/‖o‖",
    meaning: "Length of each key’s projected value over that of the layer’s output: the second factor of ĉ.",
  },
  cosine: {
    label: "cosine", symbol: "cos(o, ṽ)",
    meaning: "Whether each key’s projected value points the way of the layer’s output (1) or against it (−1): the third factor of ĉ.",
  },
  stream_contribution: { label: "stream contribution", symbol: "|ĉ|·‖o‖/‖x‖" },
  output_distance: { label: "output distance (ALTI)", symbol: "" },
};

function metricLabel(name) {
  const known = METRICS[name];
  if (!known) return name.replaceAll("_", " ");
  return known.symbol ? `${known.label}  ${known.symbol}` : known.label;
}

// Numbers out of base64: 16-bit multiples of a unit, or 32-bit floats, both little-endian.
function decode(packed) {
  const { buffer } = bytesOf(packed.int16 ?? packed.float32);
  if (packed.float32 !== undefined) return new Float32Array(buffer);
  const steps = new Int16Array(buffer);
  const values = new Float32Array(steps.length);
  for (let at = 0; at < steps.length; at++) values[at] = steps[at] * packed.unit;
  return values;
}

function select(label, options, value, onChange) {
  const box = element("select");
  for (const [key, text] of options) box.append(element("option", { value: key, text }));
  box.value = value;
  box.addEventListener("change", () => onChange(box.value));
  return element("label", { text: label }, box);
}

// A slider over places of a list; its label says the one it stands at.
function slider(names, value, onChange) {
  const said = element("output", { text: names[Number(value)] });
  const input = element("input", { type: "range", min: 0, max: names.length - 1, step: 1, value });
  input.disabled = names.length < 2;
  input.addEventListener("input", () => {
    said.textContent = names[Number(input.value)];
    onChange(input.value);
  });
  return element("label", { className: "slider" }, said, input);
}

function choices(label, options, value, onChange) {
  const row = element("div", { className: "choices" });
  const group = `choice-${label}`;
  for (const [key, text] of options) {
    const input = element("input", { type: "radio", name: group, value: key, checked: key === value });
    input.addEventListener("change", () => onChange(key));
    row.append(element("label", {}, input, element("span", { text })));
  }
  return element("fieldset", {}, element("legend", { text: label }), row);
}

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e-3 && size < 1e5 ? String(Number(size.toPrecision(3))) : size.toExponential(1);
  return value < 0 ? `−${text}` : text;
}

function percent(share) {
  const size = Math.abs(share) * 100;
  const text = size.toFixed(size >= 9.95 ? 0 : size >= 0.95 ? 1 : 2);
  return `${share < 0 && Number(text) ? "−" : ""}${text}\u00a0%`;
}

// Scores, divided by their total of magnitudes.
function shares(scores) {
  let total = 0;
  for (const value of scores) total += Math.abs(value);
  return Float32Array.from(scores, (value) => (total > 0 ? value / total : 0));
}

// Colours: zero is the paper, blue is positive, orange is negative, in both themes.
function colours() {
  return darkness.matches
    ? { zero: "#24262b", positive: ["#3d6f9e", "#8cc6ff"], negative: ["#9a6232", "#ffb46b"], ink: "#e7e7ea", rule: "#3a3b40" }
    : { zero: "#f7f7f7", positive: ["#7fb0d6", "#0b4a8f"], negative: ["#e9ab6c", "#9c4a02"], ink: "#1c1c1e", rule: "#dcdce0" };
}

function colourScale(signed) {
  const c = colours();
  if (!signed) return [[0, c.zero], [0.5, c.positive[0]], [1, c.positive[1]]];
  return [[0, c.negative[1]], [0.25, c.negative[0]], [0.5, c.zero], [0.75, c.positive[0]], [1, c.positive[1]]];
}

// Small marks on the negative cells of a plotly map, which tell them apart in black and white too.
const MARKED_CELLS = 20_000;
const SMALLEST_MARKED = 1 / 20; // of the range
function markColour(value, top) { // light on what is dark
  const [light, dark] = darkness.matches ? ["#e7e7ea", "#17181b"] : ["#ffffff", "#5a2a00"];
  return (value < -top / 2) !== darkness.matches ? light : dark;
}
function negativeMarks(z, x, y, top) {
  const marks = { x: [], y: [] };
  const colours = [];
  if (z.length * z[0].length <= MARKED_CELLS) {
    z.forEach((row, at) => row.forEach((value, place) => {
      if (value !== null && value < -top * SMALLEST_MARKED) {
        marks.x.push(x[place]);
        marks.y.push(y[at]);
        colours.push(markColour(value, top));
      }
    }));
  }
  const size = Math.max(2, Math.min(5, 90 / z.length));
  return {
    type: "scatter", mode: "markers", ...marks, hoverinfo: "skip", showlegend: false,
    marker: { symbol: "circle", size, color: colours, line: { width: 0 } },
  };
}

// A printed colour bar: a gradient, and ticks of [position from 0 to 1, text].
function colourBar(gradient, ticks, note) {
  const bar = element("div", { className: "bar" });
  const strip = element("div", { className: "gradient" });
  strip.style.background = gradient;
  const marks = element("div", { className: "ticks" });
  for (const [position, text] of ticks) {
    const mark = element("span", { text });
    mark.style.left = `${100 * position}%`;
    marks.append(mark);
  }
  bar.append(strip, marks, element("div", { text: note }));
  return bar;
}

// Plotly reads tags and formulas in texts; a token must stay what it is.
function plotlyText(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll("$", "&#36;");
}

function plotlyLayout(changes) {
  const c = colours();
  const axis = { showgrid: false, zeroline: false, ticks: "outside", ticklen: 3, tickcolor: c.rule, linecolor: c.rule, fixedrange: false };
  const { xaxis, yaxis, ...rest } = changes;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.querySelector(".controls")).fontFamily, size: 11, color: c.ink },
    hoverlabel: { font: { size: 12 }, align: "left" },
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...rest,
  };
}

const PLOTLY_CONFIG = {
  displaylogo: false, responsive: true,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
  toImageButtonOptions: { format: "svg" },
};

// Sections are drawn when they come near the window, before printing, and again in a new theme.
const drawn = new Set();
function whenSeen(section, draw, signal) {
  const once = () => {
    if (!drawn.has(draw) && !signal.aborted) { drawn.add(draw); draw(); }
  };
  new IntersectionObserver((entries, observer) => {
    if (entries.some((entry) => entry.isIntersecting)) { observer.disconnect(); once(); }
  }, { rootMargin: "300px" }).observe(section);
  addEventListener("beforeprint", once, { signal });
}
darkness.addEventListener("change", () => drawn.forEach((draw) => draw()));
