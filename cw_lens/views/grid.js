// The heads of one layer: all of them small, drawn by circuitsvis, and one large beside them.

const GRID_CELLS = 41_000; // more, and a switch takes seconds
const LARGE_TOKENS = 400;
const GRID_POSITIVE = "#0b4a8f"; // mixed with white by circuitsvis, in both themes
const GRID_NEGATIVE = "#9c4a02";
const DOTTED_TOKENS = 40; // more, and the cells of a small map are too small to hold a dot
const gridState = { layer: START, metric: DATA.metrics[0], range: "most", tokens: "0", head: MEAN, over: null };
let grid;

// CircuitsVis.render makes a new React root at each call and gives no way to end the one before.
// This component keeps one root for the life of the page and is told to draw anew as React's own
// class components are; its children are made from the shape of an element that circuitsvis made.
function HeadGrid(props) {
  this.props = props;
  grid = this;
}
HeadGrid.prototype = {
  isReactComponent: {},
  render() {
    return reactElement("div", { className: "heads", children: gridHeads().map(smallHead) });
  },
};

function reactElement(type, props, key = null) {
  return { ...CircuitsVis.Hello({ name: "" }), type, props, key };
}

// What was chosen in the prompt before, where this one has it.
function takeUp({ metric, range, index, number }) {
  Object.assign(gridState, { metric, range });
  const layer = LAYERS.findIndex((one) => one.index === index);
  if (layer < 0) return;
  gridState.layer = String(layer);
  if (LAYERS[layer].heads.includes(number)) gridState.head = LAYERS[layer].heads.indexOf(number);
}

function gridLayer() {
  return LAYERS[Number(gridState.layer)];
}

function gridHeads() {
  const { heads } = gridLayer();
  return heads[0] === "all" ? [MEAN] : [MEAN, ...heads.keys()];
}

function gridTokens() {
  const sets = gridSets(gridLayer());
  return (sets[Number(gridState.tokens)] ?? sets[0]).tokens;
}

function gridSets(layer) {
  return tokenSets(Math.max(16, Math.floor(Math.sqrt(GRID_CELLS / (layer.heads.length + 1)))));
}

// One range for each quantity, of all heads, layers and prompts on the page.
function gridRange() {
  return DATA.ranges[gridState.metric];
}

function smallHead(head) {
  const layer = gridLayer();
  const tokens = gridTokens();
  const top = gridRange()[gridState.range];
  const name = headName(layer, head);
  const attention = headMatrix(layer, head, gridState.metric, tokens, 0);
  const choose = () => { gridState.head = head; drawLarge(); markChosen(); };
  return reactElement("button", {
    type: "button", className: "head", "data-head": head, onClick: choose, "aria-label": `enlarge ${name}`,
    "aria-pressed": head === gridState.head, // as drawn first; a click is marked by markChosen
    onMouseEnter: () => { gridState.over = head; drawLarge(); },
    onMouseLeave: () => { gridState.over = null; drawLarge(); },
    children: [
      reactElement("span", { children: name }, "name"),
      reactElement(CircuitsVis.AttentionPattern, {
        attention,
        tokens: tokens.map((place) => PROMPT.tokens[HELD[place]]),
        showAxisLabels: false, minValue: -top, maxValue: top, positiveColor: GRID_POSITIVE, negativeColor: GRID_NEGATIVE,
        upperTriColor: "#ececee", maskUpperTri: layer.causal,
      }, "map"),
      ...(SIGNED.has(gridState.metric) && tokens.length <= DOTTED_TOKENS ? [negativeDots(attention, top)] : []),
    ],
  }, String(head));
}

// Dots on the negative cells of a small map, which are told apart without colours by them.
function negativeDots(matrix, top) {
  const paths = {};
  matrix.forEach((row, y) => row.forEach((value, x) => {
    if (value >= -top * SMALLEST_MARKED) return;
    const colour = markColour(value, top);
    paths[colour] = `${paths[colour] ?? ""}M${x + 0.5} ${y + 0.5}h0`;
  }));
  const dots = Object.entries(paths).map(([stroke, d]) =>
    reactElement("path", { d, stroke, strokeWidth: 0.5, strokeLinecap: "round" }, stroke));
  return reactElement("svg", { className: "dots", viewBox: `0 0 ${matrix.length} ${matrix.length}`, children: dots }, "dots");
}

function drawGrid() {
  const range = gridRange();
  drawGridBar(range, range[gridState.range]);
  const meaning = METRICS[gridState.metric].meaning ?? "";
  document.getElementById("grid-meaning").textContent = DATA.difference ? `${DATA.difference}, of: ${meaning}` : meaning;
  if (grid) grid.updater.enqueueForceUpdate(grid);
  else CircuitsVis.render("head-grid", HeadGrid);
  drawLarge();
  requestAnimationFrame(markChosen);
}

// The head that stands beside the small ones: the one under the mouse, or the one last clicked.
function drawLarge() {
  const layer = gridLayer();
  const head = gridState.over ?? gridState.head;
  const sets = tokenSets(LARGE_TOKENS);
  const tokens = sets.length > 1 ? gridTokens() : sets[0].tokens;
  const { metric } = gridState;
  const signed = SIGNED.has(metric);
  const top = gridRange()[gridState.range];
  document.getElementById("large-name").textContent = `${headName(layer, head)} · ${metricLabel(metric)}`;
  const plot = document.getElementById("large");
  drawTokenMap(plot, headMatrix(layer, head, metric, tokens, null), tokens, { title: metricLabel(metric), signed, top });
  hearEdges(plot, "grid-readout", () => ({ layer: gridLayer(), head: gridState.over ?? gridState.head }));
}

function markChosen() {
  for (const button of document.querySelectorAll("#head-grid .head")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.head) === gridState.head));
  }
}

function drawGridBar(range, top) {
  const signed = SIGNED.has(gridState.metric);
  const ticks = signed
    ? [[0, number(-top)], [0.25, number(-top / 2)], [0.5, "0"], [0.75, number(top / 2)], [1, number(top)]]
    : [[0, "0"], [0.5, number(top / 2)], [1, number(top)]];
  const gradient = `linear-gradient(to right, ${signed ? `${GRID_NEGATIVE}, ` : ""}#fff, ${GRID_POSITIVE})`;
  const beyond = top < range.largest
    ? `1 % of the edges lie beyond, up to ${number(range.largest)} in magnitude, and take the end colour.` : "The largest magnitude sets the range.";
  const bar = colourBar(gradient, ticks, `${DATA.difference ? `${DATA.difference}: ` : ""}${metricLabel(gridState.metric)}. One range for all heads${DATA.prompts.length > 1 ? ", layers and prompts" : " and layers"} here. ${beyond}`);
  bar.dataset.top = top;
  document.getElementById("grid-bar").replaceChildren(bar);
}

function buildGrid() {
  if (CHOSEN.grid) takeUp(CHOSEN.grid);
  life.addEventListener("abort", () => {
    const { index, heads } = gridLayer();
    CHOSEN.grid = { ...gridState, index, number: heads[gridState.head] };
  });
  const set = (name) => (value) => { gridState[name] = value; drawGrid(); };
  const controls = [
    choices("Show", DATA.metrics.map((name) => [name, metricLabel(name)]), gridState.metric, set("metric")),
    slider(layerNames(), gridState.layer, set("layer")),
    select("Colour range", [["most", "99 % of the edges"], ["largest", "all edges"]], gridState.range, set("range")),
  ];
  const sets = gridSets(LAYERS[0]);
  if (sets.length > 1) {
    controls.push(select("Tokens drawn", sets.map(({ label }, place) => [String(place), label]), gridState.tokens, set("tokens")));
  }
  document.getElementById("grid-controls").append(...controls);
  whenSeen(document.getElementById("grid-frame"), drawGrid, life);
}

if (document.getElementById("grid-section")) buildGrid();
