// The text twice, coloured: above by attention, below by a metric of choice.

const TOKENS_AT_A_TIME = 2000;
const SCORES = {};
for (const [name, { signed, layers }] of Object.entries(DATA.scores)) {
  const rows = layers.map(decode);
  const mean = new Float32Array(N_TOKENS);
  for (const row of rows) row.forEach((value, token) => { mean[token] += value / rows.length; });
  SCORES[name] = { signed, rows, mean };
}

const textState = { layer: "mean", metric: "contribution", scale: "root", shown: TOKENS_AT_A_TIME, here: 0 };
const textLines = {};

function textScores(metric) {
  const score = SCORES[metric];
  return textState.layer === "mean" ? score.mean : score.rows[Number(textState.layer)];
}

// Scores of one line divided by the line's total of magnitudes.
function lineShares(metric) {
  const scores = textScores(metric);
  let total = 0;
  for (const value of scores) total += Math.abs(value);
  return Float32Array.from(scores, (value) => (total > 0 ? value / total : 0));
}

// Positions marked as sinks in the chosen layer; for the mean, in at least half of the layers.
function sinkCounts() {
  const counts = new Uint16Array(N_TOKENS);
  for (const row of DATA.sinks) for (const token of row) counts[token] += 1;
  return counts;
}
const SINK_COUNTS = sinkCounts();

function isSink(token) {
  if (textState.layer === "mean") return 2 * SINK_COUNTS[token] >= DATA.sinks.length && SINK_COUNTS[token] > 0;
  return DATA.sinks[Number(textState.layer)].includes(token);
}

function drawText() {
  const upper = lineShares("attention");
  const lower = lineShares(textState.metric);
  const root = textState.scale === "root";
  let top = 0;
  for (const line of [upper, lower]) {
    for (let t = root ? 0 : Math.min(1, N_TOKENS - 1); t < N_TOKENS; t++) top = Math.max(top, Math.abs(line[t]));
  }
  const depth = (share) => {
    const part = top > 0 ? Math.min(1, Math.abs(share) / top) : 0;
    return root ? Math.sqrt(part) : part;
  };
  fillLine("attention", "attention", upper, depth);
  fillLine("lower", textState.metric, lower, depth);
  drawTextBar(top, root, SCORES[textState.metric].signed);
  writeReadout();
}

function fillLine(place, metric, shares, depth) {
  const { name, box } = textLines[place];
  name.replaceChildren(element("b", { text: metricLabel(metric) }),
    ` — first token ${percent(shares[0])} of the line`);
  [...box.children].forEach((node) => {
    if (node.dataset.token === undefined) return;
    const token = Number(node.dataset.token);
    const deep = depth(shares[token]);
    const colour = shares[token] < 0 ? "var(--negative)" : "var(--positive)";
    node.style.setProperty("--fill", `color-mix(in srgb, ${colour} ${(100 * deep).toFixed(1)}%, transparent)`);
    node.classList.toggle("strong", deep > (darkness.matches ? 0.62 : 0.8));
    node.classList.toggle("sink", isSink(token));
  });
}

function drawTextBar(top, root, signed) {
  const at = root ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.5, 1];
  const share = (p) => percent(top * (root ? p * p : p));
  const ends = "transparent, var(--positive)";
  const ticks = signed
    ? [[0, percent(-top)], [0.25, `−${share(0.5)}`], [0.5, "0"], [0.75, share(0.5)], [1, share(1)]]
    : at.map((p) => [p, p ? share(p) : "0"]);
  const gradient = `linear-gradient(to right, ${signed ? `var(--negative), ${ends}` : ends})`;
  const scale = root ? "Share of a line, square-root scale." : "Share of a line, linear scale; the first token may lie beyond it.";
  const where = textState.layer === "mean" ? "at least half of the layers" : "this layer";
  const bar = colourBar(gradient, ticks, scale);
  bar.append(element("span", { className: "sample-sink", text: "Underlined" }), `: marked as a sink in ${where}.`);
  document.getElementById("text-bar").replaceChildren(bar);
}

function addTokens() {
  for (const { box } of Object.values(textLines)) {
    const fresh = document.createDocumentFragment();
    for (let t = box.querySelectorAll(".token").length; t < Math.min(textState.shown, N_TOKENS); t++) {
      fresh.append(element("span", { className: "token", text: DATA.tokens[t], "data-token": t }));
      fresh.append(DATA.tokens[t].includes("↵") ? element("br") : element("wbr"));
    }
    box.append(fresh);
  }
  const more = document.getElementById("text-more");
  more.hidden = textState.shown >= N_TOKENS;
  more.querySelector("span").textContent = `Tokens 0 to ${Math.min(textState.shown, N_TOKENS) - 1} of ${N_TOKENS}. `;
}

function writeReadout() {
  const t = textState.here;
  for (const { box } of Object.values(textLines)) {
    box.querySelector(".here")?.classList.remove("here");
    box.querySelector(`[data-token="${t}"]`)?.classList.add("here");
  }
  const part = (metric) =>
    `${metricLabel(metric)}: ${percent(lineShares(metric)[t])} of the line (score ${number(textScores(metric)[t])})`;
  const sinks = SINK_COUNTS[t] ? ` · sink in ${SINK_COUNTS[t]} of ${DATA.sinks.length} layers` : "";
  const name = element("bdi");
  name.append(element("b", { text: DATA.tokens[t] }));
  document.getElementById("text-readout").replaceChildren(
    name, ` · position ${t} · id ${DATA.ids[t]}${sinks}`, element("br"),
    `${part("attention")} · ${part(textState.metric)}`);
}

function goTo(token) {
  textState.here = Math.min(Math.max(0, token), Math.min(N_TOKENS, textState.shown) - 1);
  writeReadout();
}

function buildText() {
  const layers = [["mean", "mean over layers"], ...DATA.score_layers.map((layer, row) => [String(row), `layer ${layer}`])];
  const metrics = Object.keys(SCORES).filter((name) => name !== "attention").map((name) => [name, metricLabel(name)]);
  const set = (name) => (value) => { textState[name] = value; drawText(); };
  document.getElementById("text-controls").append(
    select("Layer", layers, "mean", set("layer")),
    select("Lower line", metrics, textState.metric, set("metric")),
    select("Colour scale", [["root", "square root, all tokens"], ["linear", "linear, without the first token"]], "root", set("scale")));
  const host = document.getElementById("text-lines");
  for (const place of ["attention", "lower"]) {
    const name = element("p", { className: "line-name" });
    const box = element("div", { className: "line", id: `line-${place}`, tabIndex: 0 });
    textLines[place] = { name, box };
    host.append(name, box);
    for (const kind of ["mouseover", "click"]) {
      box.addEventListener(kind, (event) => {
        if (event.target.dataset.token !== undefined) goTo(Number(event.target.dataset.token));
      });
    }
    box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) { event.preventDefault(); goTo(textState.here + step); }
    });
  }
  const more = element("p", { id: "text-more", className: "more" }, element("span"),
    element("button", { type: "button", text: `Show ${TOKENS_AT_A_TIME} more` }));
  more.querySelector("button").addEventListener("click", () => {
    textState.shown += TOKENS_AT_A_TIME;
    addTokens();
    drawText();
  });
  host.append(more, element("div", { id: "text-bar" }));
  addTokens();
  drawText();
  drawn.add(drawText);
}

buildText();
