// Edges of the layers held: read by (metric, head, query, key), with what can be derived derived.

const HELD = DATA.held_tokens ?? DATA.tokens.map((_, position) => position);
const LAYERS = DATA.layers.map(({ index, causal, heads, ...packed }) => {
  const layer = { index, causal, heads };
  for (const [name, numbers] of Object.entries(packed)) layer[name] = decode(numbers);
  return layer;
});

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
  contribution: (layer, at) => Math.abs(layer.signed_contribution[at]),
  intra_head_contribution: (layer, at) => layer.intra_head_contribution[at],
  signed_contribution: (layer, at) => layer.signed_contribution[at],
  cosine: (layer, at) => layer.cosine[at],
  relative_norm: (layer, at, head, key, query) => valueNorm(layer, at, head, key, query) / layer.output_norm[query],
};
const SIGNED = new Set(["intra_head_contribution", "signed_contribution", "cosine"]);

// One head's rows among some of the tokens held; `unseen` fills what a causal query cannot see.
function headMatrix(layer, head, metric, tokens, unseen) {
  const read = EDGE[metric];
  return tokens.map((query) => tokens.map((key) =>
    layer.causal && key > query ? unseen : read(layer, edgeAt(layer, head, query, key), head, key, query)));
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
  const strength = SCORES.contribution.mean;
  const strongest = all.slice(1).sort((a, b) => strength[HELD[b]] - strength[HELD[a]] || a - b).slice(0, limit - 1);
  const sets = [{ label: `the ${limit} with most contribution`, tokens: [0, ...strongest].sort((a, b) => a - b) }];
  for (let start = 1; start < HELD.length; start += limit - 1) {
    const run = all.slice(start, start + limit - 1);
    sets.push({ label: `first, and ${HELD[run[0]]} to ${HELD[run[run.length - 1]]}`, tokens: [0, ...run] });
  }
  return sets;
}

function layerOptions() {
  return LAYERS.map((layer, place) => [String(place), `layer ${layer.index}`]);
}

if (!LAYERS.length) {
  for (const id of ["grid-section", "factors-section"]) document.getElementById(id).hidden = true;
}
