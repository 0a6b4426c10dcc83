// Numbers of the chosen prompt: token scores, and the edges of the layers held, read by
// (metric, head, query, key), with what can be derived derived.

const N_TOKENS = PROMPT.tokens.length;
const SCORES = {};
for (const [name, { signed, layers }] of Object.entries(PROMPT.scores)) {
  const rows = layers.map(decode);
  const mean = new Float32Array(N_TOKENS);
  for (const row of rows) row.forEach((value, token) => { mean[token] += value / rows.length; });
  SCORES[name] = { signed, rows, mean };
}
const HELD = PROMPT.held_tokens ?? PROMPT.tokens.map((_, position) => position);
const LAYERS = PROMPT.layers.map(({ index, causal, heads, ...packed }) => {
  const layer = { index, causal, heads };
  for (const [name, numbers] of Object.entries(packed)) layer[name] = decode(numbers);
  return layer;
});
const START = String(Math.max(0, LAYERS.findIndex((layer) => layer.index === DATA.start_layer)));
const MEAN = -1; // in place of a head: the mean over the heads held

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
for (const name of DATA.held_metrics) EDGE[name] = (layer, at) => layer[name][at];

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
  if (head === MEAN || layer.heads[head] === "mean") return `L${layer.index} mean`;
  return `L${layer.index} H${layer.heads[head]}`;
}

// What hovering over an edge tells: who looks at whom, and all that the page knows of it.
function tellEdge(box, layer, head, query, key) {
  const name = (token) => element("bdi", {}, element("b", { text: PROMPT.tokens[HELD[token]] }));
  const told = DATA.told.map((metric) => `${metricLabel(metric)} ${number(edge(layer, head, metric, query, key))}`);
  box.replaceChildren(
    `${headName(layer, head)} · query ${HELD[query]} `, name(query), ` · key ${HELD[key]} `, name(key),
    element("br"), told.join(" · "));
}

// Magnitudes of a quantity over heads of layers: the largest, and what 99 % stay within.
function magnitudes(metric, layers, onlyHead) {
  const n = HELD.length;
  const heads = layers.map((layer) => (onlyHead === undefined ? layer.heads.map((_, head) => head) : [onlyHead]));
  const edges = layers.reduce((sum, layer, i) => sum + heads[i].length * (layer.causal ? (n * (n + 1)) / 2 : n * n), 0);
  const sizes = new Float32Array(edges);
  const read = EDGE[metric];
  let count = 0;
  layers.forEach((layer, i) => {
    for (const head of heads[i]) {
      for (let query = 0; query < n; query++) {
        const keys = layer.causal ? query + 1 : n;
        for (let key = 0; key < keys; key++) {
          sizes[count++] = Math.abs(read(layer, edgeAt(layer, head, query, key), head, key, query));
        }
      }
    }
  });
  const sorted = sizes.sort();
  const largest = sorted[sorted.length - 1] || 1;
  return { largest, most: sorted[Math.ceil(0.99 * sorted.length) - 1] || largest };
}

// Sets of at most `limit` tokens to draw at once; the first token is in each.
function tokenSets(limit) {
  const all = HELD.map((_, place) => place);
  if (HELD.length <= limit) return [{ label: `all ${HELD.length}`, tokens: all }];
  const strength = SCORES.contribution?.mean ?? new Float32Array(N_TOKENS);
  const strongest = all.slice(1).sort((a, b) => strength[HELD[b]] - strength[HELD[a]] || a - b).slice(0, limit - 1);
  const sets = [{ label: `the ${limit} with most contribution`, tokens: [0, ...strongest].sort((a, b) => a - b) }];
  for (let start = 1; start < HELD.length; start += limit - 1) {
    const run = all.slice(start, start + limit - 1);
    sets.push({ label: `first, and ${HELD[run[0]]} to ${HELD[run[run.length - 1]]}`, tokens: [0, ...run] });
  }
  return sets;
}

function layerNames() {
  return LAYERS.map((layer) => `layer ${layer.index}`);
}

if (!LAYERS.length) {
  for (const id of ["grid-section", "factors-section"]) document.getElementById(id)?.remove();
}
