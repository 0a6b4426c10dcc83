// Numbers of the chosen prompt: token scores, and the edges of the layers held, read by
// (metric, head, query, key), with what can be derived derived.

const N_TOKENS = PROMPT.tokens.length;
const SCORES = {};
for (const [name, layers] of Object.entries(PROMPT.scores)) {
  const rows = layers.map(decode);
  const mean = new Float32Array(N_TOKENS);
  for (const row of rows) row.forEach((value, token) => { mean[token] += value / rows.length; });
  SCORES[name] = { rows, mean };
}
const HELD = PROMPT.held_tokens ?? PROMPT.tokens.map((_, position) => position);
const WHOLE = HELD.length === N_TOKENS;
const LAYERS = PROMPT.layers.map(({ index, causal, heads, n_heads, own, ...packed }) => {
  const layer = { index, causal, heads, n_heads, own: {} };
  for (const [name, numbers] of Object.entries(packed)) layer[name] = decode(numbers);
  for (const [name, numbers] of Object.entries(own)) layer.own[name] = decode(numbers);
  return layer;
});
const START = String(Math.max(0, LAYERS.findIndex((layer) => layer.index === DATA.start_layer)));
const MEAN = -1; // in place of a head: the mean over the heads held

// Where a held token stands in its text; in a comparison, in both texts.
function positionOf(token) {
  return PROMPT.positions ? PROMPT.positions[HELD[token]] : HELD[token];
}

function edgeAt(layer, head, query, key) {
  const n = HELD.length;
  if (!layer.causal) return (head * n + query) * n + key;
  return (head * n * (n + 1)) / 2 + (query * (query + 1)) / 2 + key;
}

// A value's length as a query sees it: the same for every query, unless the layer has a gate.
function valueNorm(layer, at, head, key, query) {
  if (layer.relative_norm) return layer.relative_norm[at] * layer.output_norm[query];
  return layer.value_norm[head * HELD.length + key];
}

// Each quantity of an edge, given its place in the matrices.
const EDGE = {
  attention: (layer, at) => layer.attention[at],
  value_weighted: (layer, at, head, key, query) => layer.attention[at] * valueNorm(layer, at, head, key, query),
  value_weighted_output_normalized: (layer, at, head, key, query) =>
    (layer.attention[at] * valueNorm(layer, at, head, key, query)) / layer.output_norm[query],
  contribution: (layer, at) => Math.abs(layer.signed_contribution[at]),
  intra_head_contribution: (layer, at) => layer.intra_head_contribution[at],
  signed_contribution: (layer, at) => layer.signed_contribution[at],
  cosine: (layer, at) => layer.cosine[at],
  relative_norm: (layer, at, head, key, query) => valueNorm(layer, at, head, key, query) / layer.output_norm[query],
};
const SIGNED = new Set(["intra_head_contribution", "signed_contribution", "cosine", ...DATA.signed]);
for (const name of DATA.held_metrics) EDGE[name] = (layer, at) => layer.own[name][at];

// One edge's quantity in one head, or its mean over the heads held.
function edge(layer, head, metric, query, key) {
  if (head !== MEAN) return EDGE[metric](layer, edgeAt(layer, head, query, key), head, key, query);
  let sum = 0;
  for (let place = 0; place < layer.heads.length; place++) sum += edge(layer, place, metric, query, key);
  return sum / layer.heads.length;
}

// One head's rows among some of the tokens held; `unseen` fills what a causal query cannot see.
function headMatrix(layer, head, metric, tokens, unseen) {
  return tokens.map((query) => tokens.map((key) =>
    layer.causal && key > query ? unseen : edge(layer, head, metric, query, key)));
}

function headName(layer, head) {
  if (layer.heads[0] === "all") return `L${layer.index} all heads`;
  if (head === MEAN) {
    const part = layer.heads.length < layer.n_heads ? ` of ${layer.heads.length} of ${layer.n_heads} heads` : "";
    return `L${layer.index} mean${part}`;
  }
  return `L${layer.index} H${layer.heads[head]}`;
}

// What hovering over an edge tells: who looks at whom, and all that the page knows of it.
function tellEdge(box, layer, head, query, key) {
  const name = (token) => element("bdi", {}, element("b", { text: PROMPT.tokens[HELD[token]] }));
  const told = DATA.told.map((metric) => `${metricLabel(metric)} ${number(edge(layer, head, metric, query, key))}`);
  box.replaceChildren(
    `${headName(layer, head)} · query ${positionOf(query)} `, name(query), ` · key ${positionOf(key)} `, name(key),
    element("br"), told.join(" · "));
}

// Magnitudes of a quantity in one head: what 99 % of the edges stay within, or the largest.
function headRange(metric, layer, head) {
  const sizes = [];
  HELD.forEach((_, query) => HELD.forEach((_, key) => {
    if (!layer.causal || key <= query) sizes.push(Math.abs(edge(layer, head, metric, query, key)));
  }));
  const sorted = Float32Array.from(sizes).sort();
  return sorted[Math.ceil(0.99 * sorted.length) - 1] || sorted[sorted.length - 1] || 1;
}

// Sets of at most `limit` tokens to draw at once; the first token is in each.
function tokenSets(limit) {
  const all = HELD.map((_, place) => place);
  if (HELD.length <= limit) return [{ label: `all ${HELD.length}`, tokens: all }];
  const strength = PROMPT.change ? decode(PROMPT.change) : SCORES.contribution.mean;
  const strongest = all.slice(1).sort((a, b) => strength[HELD[b]] - strength[HELD[a]] || a - b).slice(0, limit - 1);
  const sets = [{ label: `the ${limit} ${PROMPT.change ? "that change most" : "with most contribution"}`, tokens: [0, ...strongest].sort((a, b) => a - b) }];
  for (let start = 1; start < HELD.length; start += limit - 1) {
    const run = all.slice(start, start + limit - 1);
    sets.push({ label: `first, and ${positionOf(run[0])} to ${positionOf(run[run.length - 1])}`, tokens: [0, ...run] });
  }
  return sets;
}

function layerNames() {
  return LAYERS.map((layer) => `layer ${layer.index}`);
}

if (!LAYERS.length) {
  for (const id of ["grid-section", "factors-section"]) document.getElementById(id)?.remove();
}
