// The heads of one layer in circuitsvis' grid.

const GRID_CELLS = 64000; // more, and hovering over a head takes seconds
const GRID_POSITIVE = "#0b4a8f"; // mixed with white by circuitsvis, in both themes
const GRID_NEGATIVE = "#9c4a02";
const GRID_METRICS = ["attention", "value_weighted", "contribution", "intra_head_contribution", "signed_contribution"];
const gridState = { layer: "0", metric: "signed_contribution", range: "most", tokens: "0" };
const gridRanges = {};
let gridProps;
let grid;

// CircuitsVis.render makes a new React root at each call and gives no way to end the one before.
// This component keeps one root for the life of the page, with the enlarged head, and is told to
// draw anew as React's own class components are.
function HeadGrid(props) {
  this.props = props;
  grid = this;
}
HeadGrid.prototype = {
  isReactComponent: {},
  render() {
    return { ...CircuitsVis.Hello({ name: "" }), type: CircuitsVis.AttentionHeads, props: gridProps };
  },
};

function gridSets(layer) {
  return tokenSets(Math.max(16, Math.floor(Math.sqrt(GRID_CELLS / layer.heads.length))));
}

function gridRange() {
  const { metric } = gridState;
  gridRanges[metric] ??= magnitudes(metric, LAYERS);
  return gridRanges[metric];
}

function drawGrid() {
  const layer = LAYERS[Number(gridState.layer)];
  const sets = gridSets(layer);
  const { tokens } = sets[Number(gridState.tokens)] ?? sets[0];
  const range = gridRange();
  const top = range[gridState.range];
  gridProps = {
    attention: layer.heads.map((_, head) => headMatrix(layer, head, gridState.metric, tokens, 0)),
    attentionHeadNames: layer.heads.map((head) => `L${layer.index} H${head}`),
    tokens: tokens.map((place) => DATA.tokens[HELD[place]]),
    minValue: -top, maxValue: top, positiveColor: GRID_POSITIVE, negativeColor: GRID_NEGATIVE, maskUpperTri: layer.causal,
  };
  drawGridBar(range, top);
  document.getElementById("grid-meaning").textContent = METRICS[gridState.metric].meaning;
  if (grid) grid.updater.enqueueForceUpdate(grid);
  else CircuitsVis.render("head-grid", HeadGrid);
}

function drawGridBar(range, top) {
  const signed = SIGNED.has(gridState.metric);
  const ticks = signed
    ? [[0, number(-top)], [0.25, number(-top / 2)], [0.5, "0"], [0.75, number(top / 2)], [1, number(top)]]
    : [[0, "0"], [0.5, number(top / 2)], [1, number(top)]];
  const gradient = `linear-gradient(to right, ${signed ? `${GRID_NEGATIVE}, ` : ""}#fff, ${GRID_POSITIVE})`;
  const beyond = top < range.largest
    ? `1 % of the edges lie beyond, up to ${number(range.largest)} in magnitude, and take the end colour.` : "The largest magnitude sets the range.";
  const bar = colourBar(gradient, ticks, `${metricLabel(gridState.metric)}. One range for all heads and layers here. ${beyond}`);
  bar.dataset.top = top;
  document.getElementById("grid-bar").replaceChildren(bar);
}

function buildGrid() {
  const set = (name) => (value) => { gridState[name] = value; drawGrid(); };
  const controls = [
    choices("Show", GRID_METRICS.map((name) => [name, metricLabel(name)]), gridState.metric, set("metric")),
    select("Layer", layerOptions(), gridState.layer, set("layer")),
    select("Colour range", [["most", "99 % of the edges"], ["largest", "all edges"]], gridState.range, set("range")),
  ];
  const sets = gridSets(LAYERS[0]);
  if (sets.length > 1) {
    controls.push(select("Tokens drawn", sets.map(({ label }, place) => [String(place), label]), "0", set("tokens")));
  }
  document.getElementById("grid-controls").append(...controls);
  whenSeen(document.getElementById("grid-frame"), drawGrid);
}

if (LAYERS.length) buildGrid();
