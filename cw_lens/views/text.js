// The text twice, coloured: above by attention, below by a metric of choice; by the score of each
// token, or by what one token, the query, receives from each.

const TOKENS_AT_A_TIME = 2000;
const textState = {
  layer: "mean", head: String(MEAN), metric: DATA.text_metrics.find((name) => name !== "attention") ?? "attention", scale: "root", query: null, shown: TOKENS_AT_A_TIME, here: 0,
};
const textLines = {};

// The layers held among those chosen; a query's edges, and single heads, are known in these alone.
function textLayers() {
  if (textState.layer === "mean") return LAYERS;
  const index = PROMPT.score_layers[Number(textState.layer)];
  return LAYERS.filter((layer) => layer.index === index);
}

// The layers held in which the chosen head is.
function edgeLayers() {
  const chosen = Number(textState.head);
  return textLayers().filter((layer) => chosen === MEAN || layer.heads.includes(chosen));
}

function readsEdges() {
  return textState.query !== null || textState.head !== String(MEAN);
}

// One number for each token: its score, or its weight at the query.
function textScores(metric) {
  if (readsEdges()) return edgeScores(metric);
  const score = SCORES[metric];
  return textState.layer === "mean" ? score.mean : score.rows[Number(textState.layer)];
}

function edgeScores(metric) {
  const scores = new Float32Array(N_TOKENS);
  const chosen = Number(textState.head);
  const layers = edgeLayers();
  const { query } = textState;
  const n = HELD.length;
  for (const layer of layers) {
    const head = chosen === MEAN ? MEAN : layer.heads.indexOf(chosen);
    for (let key = 0; key < n; key++) {
      const seen = (q) => !layer.causal || key <= q;
      let value = 0;
      if (query !== null) value = seen(query) ? edge(layer, head, metric, query, key) : 0;
      else {
        let queries = 0;
        for (let q = 0; q < n; q++) if (seen(q)) { value += edge(layer, head, metric, q, key); queries++; }
        value /= queries;
      }
      scores[HELD[key]] += value / layers.length;
    }
  }
  return scores;
}

function textMetrics() {
  const known = readsEdges() ? EDGE : SCORES;
  const offered = DATA.text_metrics.filter((name) => known[name]);
  return offered.length > 1 ? offered.filter((name) => name !== "attention") : offered;
}

// Positions marked as sinks in the chosen layer; for the mean, in at least half of the layers.
function sinkCounts() {
  const counts = new Uint16Array(N_TOKENS);
  for (const row of PROMPT.sinks) for (const token of row) counts[token] += 1;
  return counts;
}
const SINK_COUNTS = sinkCounts();

function isSink(token) {
  if (textState.layer === "mean") return 2 * SINK_COUNTS[token] >= PROMPT.sinks.length && SINK_COUNTS[token] > 0;
  return PROMPT.sinks[Number(textState.layer)].includes(token);
}

// Whether the page holds no edges of a token whose weight is asked for.
function isAbsent(token) {
  return readsEdges() && !WHOLE && !HELD.includes(token);
}

function drawText() {
  for (const [place, metric] of [["attention", "attention"], ["lower", textState.metric]]) {
    const scores = textScores(metric);
    Object.assign(textLines[place], { metric, scores, shares: shares(scores) });
  }
  const [upper, lower] = [textLines.attention.shares, textLines.lower.shares];
  const root = textState.scale === "root";
  let top = 0;
  for (const line of [upper, lower]) {
    for (let t = root ? 0 : Math.min(1, N_TOKENS - 1); t < N_TOKENS; t++) top = Math.max(top, Math.abs(line[t]));
  }
  const depth = (share) => {
    const part = top > 0 ? Math.min(1, Math.abs(share) / top) : 0;
    return root ? Math.sqrt(part) : part;
  };
  for (const line of Object.values(textLines)) fillLine(line, depth);
  drawTextBar(top, root, lower.some((share) => share < 0));
  sayQuery();
  writeReadout();
}

function fillLine({ name, box, metric, shares }, depth) {
  name.replaceChildren(element("b", { text: metricLabel(metric) }),
    ` — first token ${percent(shares[0])} of the line${readsEdges() && !WHOLE ? `, of the ${HELD.length} tokens whose edges the page holds` : ""}`);
  [...box.children].forEach((node) => {
    if (node.dataset.token === undefined) return;
    const token = Number(node.dataset.token);
    const deep = depth(shares[token]);
    const negative = shares[token] < 0;
    const colour = negative ? "var(--negative)" : "var(--positive)";
    node.style.setProperty("--fill", `color-mix(in srgb, ${colour} ${(100 * deep).toFixed(1)}%, transparent)`);
    node.classList.toggle("strong", deep > (darkness.matches ? 0.62 : 0.8));
    node.classList.toggle("negative", negative && deep > 0.1);
    node.classList.toggle("sink", isSink(token));
    node.classList.toggle("query", textState.query !== null && HELD[textState.query] === token);
    node.classList.toggle("absent", isAbsent(token));
    node.classList.toggle("unseen", textState.query !== null && textLayers().some((layer) => layer.causal) && token > HELD[textState.query]);
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
  if (signed) bar.append(" Negative tokens are dotted. ");
  bar.append(element("span", { className: "sample-sink", text: "Underlined" }), `: marked as a sink in ${where}.`);
  document.getElementById("text-bar").replaceChildren(bar);
}

function addTokens() {
  for (const { box } of Object.values(textLines)) {
    const fresh = document.createDocumentFragment();
    for (let t = box.querySelectorAll(".token").length; t < Math.min(textState.shown, N_TOKENS); t++) {
      fresh.append(element("span", { className: "token", text: PROMPT.tokens[t], "data-token": t }));
      fresh.append(PROMPT.tokens[t].includes("↵") ? element("br") : element("wbr"));
    }
    box.append(fresh);
  }
  const more = document.getElementById("text-more");
  more.hidden = textState.shown >= N_TOKENS;
  more.querySelector("span").textContent = `Tokens 0 to ${Math.min(textState.shown, N_TOKENS) - 1} of ${N_TOKENS}. `;
}

// 0, 1, 2, 5 as "0-2, 5".
function numberRanges(numbers) {
  const runs = [];
  for (const one of numbers) {
    if (runs.length && runs.at(-1)[1] === one - 1) runs.at(-1)[1] = one;
    else runs.push([one, one]);
  }
  return runs.map(([first, last]) => (first === last ? first : `${first}-${last}`)).join(", ");
}

// What the colours stand for now, and the way back from a query to the scores.
function sayQuery() {
  const box = document.getElementById("text-query");
  const { query } = textState;
  const some = readsEdges() && textLayers().some((layer) => layer.heads.length < layer.n_heads);
  const heads = textState.head === String(MEAN) ? `mean over ${some ? "the heads held" : "heads"}` : `head ${textState.head}`;
  const layers = textState.layer !== "mean" ? `layer ${PROMPT.score_layers[Number(textState.layer)]}`
    : readsEdges() ? `mean over layers ${numberRanges(edgeLayers().map((layer) => layer.index))}` : "mean over all layers read";
  if (query === null) {
    const how = LAYERS.length ? " Click a token to see what it receives." : "";
    box.replaceChildren(`Score of each token: its mean weight over the tokens that see it (${layers}, ${heads}).${how}`);
    return;
  }
  const name = element("bdi", {}, element("b", { text: PROMPT.tokens[HELD[query]] }));
  const back = element("button", { type: "button", text: "Back to token scores" });
  back.addEventListener("click", () => askToken(null));
  box.replaceChildren(`What query ${HELD[query]} `, name, ` receives from each token (${layers}, ${heads}). `, back);
}

// Makes a token the query; the same one again, or none, goes back to the scores.
function askToken(token) {
  const place = token === null ? -1 : HELD.indexOf(token);
  if (token !== null && place < 0) return; // the readout says why
  textState.query = place < 0 || textState.query === place ? null : place;
  if (textState.query !== null && !textLayers().length) textState.layer = "mean";
  buildTextControls();
  drawText();
}

function writeReadout() {
  const t = textState.here;
  for (const { box } of Object.values(textLines)) {
    box.querySelector(".here")?.classList.remove("here");
    box.querySelector(`[data-token="${t}"]`)?.classList.add("here");
  }
  const kind = textState.query === null ? "score" : "weight";
  const part = ({ metric, scores, shares }) =>
    `${metricLabel(metric)}: ${percent(shares[t])} of the line (${kind} ${number(scores[t])})`;
  const told = isAbsent(t) ? "its edges are not on this page"
    : [...new Set([textLines.attention, textLines.lower].map(part))].join(" · ");
  const silent = !isAbsent(t) && !HELD.includes(t) && LAYERS.length ? " · its edges are not on this page" : "";
  const sinks = SINK_COUNTS[t] ? ` · sink in ${SINK_COUNTS[t]} of ${PROMPT.sinks.length} layers` : "";
  const name = element("bdi");
  name.append(element("b", { text: PROMPT.tokens[t] }));
  document.getElementById("text-readout").replaceChildren(
    name, ` · position ${t} · id ${PROMPT.ids[t]}${sinks}`, element("br"),
    told + silent);
}

function goTo(token) {
  textState.here = Math.min(Math.max(0, token), Math.min(N_TOKENS, textState.shown) - 1);
  writeReadout();
}

function buildTextControls() {
  const held = new Set(LAYERS.map((layer) => layer.index));
  const layers = [["mean", "mean over layers"], ...PROMPT.score_layers.map((layer, row) => [String(row), `layer ${layer}`])
    .filter((_, row) => !readsEdges() || held.has(PROMPT.score_layers[row]))];
  // without all tokens a head's scores would be of a part
  const heads = !WHOLE ? [] : [...new Set(textLayers().flatMap((layer) => layer.heads))].sort((a, b) => a - b);
  if (!textMetrics().includes(textState.metric)) textState.metric = textMetrics()[0];
  const set = (name) => (value) => {
    textState[name] = value;
    if (name === "layer" && !textLayers().length) textState.head = String(MEAN);
    buildTextControls();
    drawText();
  };
  const controls = [
    select("Layer", layers, textState.layer, set("layer")),
    select("Lower line", textMetrics().map((name) => [name, metricLabel(name)]), textState.metric, set("metric")),
    select("Colour scale", [["root", "square root, all tokens"], ["linear", "linear, without the first token"]], textState.scale, set("scale")),
  ];
  if (heads.length) {
    const options = [[String(MEAN), "mean over heads"], ...heads.map((head) => [String(head), `head ${head}`])];
    controls.push(select("Head", options, textState.head, set("head")));
  }
  document.getElementById("text-controls").replaceChildren(...controls);
}

function buildText() {
  if (CHOSEN.text) Object.assign(textState, CHOSEN.text);
  if (textState.layer !== "mean" && !PROMPT.score_layers[Number(textState.layer)]) textState.layer = "mean";
  life.addEventListener("abort", () => {
    CHOSEN.text = { layer: textState.layer, metric: textState.metric, scale: textState.scale };
  });
  const host = document.getElementById("text-lines");
  host.append(element("p", { id: "text-query", className: "meaning" }));
  for (const place of ["attention", "lower"]) {
    const name = element("p", { className: "line-name" });
    const box = element("div", { className: "line", id: `line-${place}`, tabIndex: 0 });
    textLines[place] = { name, box };
    host.append(name, box);
    box.addEventListener("mouseover", (event) => {
      if (event.target.dataset.token !== undefined) goTo(Number(event.target.dataset.token));
    });
    box.addEventListener("click", (event) => {
      if (event.target.dataset.token === undefined) return;
      goTo(Number(event.target.dataset.token));
      if (LAYERS.length) askToken(Number(event.target.dataset.token));
    });
    box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) { event.preventDefault(); goTo(textState.here + step); }
      if (event.key === "Enter" && LAYERS.length) askToken(textState.here);
      if (event.key === "Escape") askToken(null);
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
  buildTextControls();
  if (DATA.start_query !== null && DATA.start_query < N_TOKENS && !CHOSEN.text) askToken(DATA.start_query);
  else drawText();
  drawn.add(drawText);
}

if (document.getElementById("text-section")) buildText();
