// The three factors of one head's contribution, and their product.

const FACTOR_TOKENS = 400;
const FACTORS = [
  { metric: "attention", title: "attention α" },
  { metric: "relative_norm", title: "× relative norm ‖ṽ‖/‖o‖" },
  { metric: "cosine", title: "× cosine cos(o, ṽ)" },
  { metric: "signed_contribution", title: "= contribution ĉ" },
];
const factorState = { layer: START, head: "0", tokens: "0" };

// The head in which the first token's attention and contribution lie furthest apart.
function mostTellingHead(layer) {
  const row = PROMPT.profile_layers.indexOf(layer.index);
  const gap = (head) => PROMPT.profile.first_attention[row][head] - PROMPT.profile.first_contribution[row][head];
  return layer.heads.reduce((best, head, place) => (gap(head) > gap(layer.heads[best]) ? place : best), 0);
}

function drawFactors() {
  const layer = LAYERS[Number(factorState.layer)];
  const head = Number(factorState.head);
  const sets = tokenSets(FACTOR_TOKENS);
  const { tokens } = sets[Number(factorState.tokens)] ?? sets[0];
  document.querySelector("#factors-section h2").textContent = `What the contribution of ${headName(layer, head)} is made of`;
  for (const { metric, title } of FACTORS) {
    const plot = document.getElementById(`factor-${metric}`);
    const signed = SIGNED.has(metric);
    const top = { attention: 1, cosine: 1 }[metric] ?? headRange(metric, layer, head);
    drawTokenMap(plot, headMatrix(layer, head, metric, tokens, null), tokens, { title, signed, top });
    hearEdges(plot, "factor-readout", () => ({ layer: LAYERS[Number(factorState.layer)], head: Number(factorState.head) }));
  }
}

// Hovering over a map of tokens tells the edge below it, and a click keeps it there.
function hearEdges(plot, readout, where) {
  if (plot.dataset.listening) return;
  plot.dataset.listening = "yes";
  const box = document.getElementById(readout);
  const tell = ({ points: [{ x, y }] }) => {
    const { layer, head } = where();
    const tokens = plot.tokens;
    if (layer.causal && tokens[x] > tokens[y]) return;
    tellEdge(box, layer, head, tokens[y], tokens[x]);
  };
  plot.on("plotly_hover", (event) => { if (!box.dataset.kept) tell(event); });
  plot.on("plotly_click", (event) => { box.dataset.kept = "yes"; tell(event); });
  plot.on("plotly_doubleclick", () => { delete box.dataset.kept; });
}

// A token as a mark along an axis: its first letters, whole characters each.
const MARK_LETTERS = 12;
const LETTER_PIXELS = 9; // less for each token, and their names would cover one another
function shortened(token) {
  const letters = [...token];
  return letters.length > MARK_LETTERS ? `${letters.slice(0, MARK_LETTERS - 1).join("")}…` : token;
}

// A plotly map of queries by keys, with the tokens along its sides.
function drawTokenMap(plot, z, tokens, { title, signed, top }) {
  plot.tokens = tokens;
  const names = tokens.map((place) => plotlyText(PROMPT.tokens[HELD[place]]));
  const short = tokens.map((place) => plotlyText(shortened(PROMPT.tokens[HELD[place]])));
  const places = tokens.map((_, at) => at);
  const few = tokens.length <= 24;
  const down = few && (plot.clientHeight - 122) / tokens.length >= LETTER_PIXELS;
  const across = few && (plot.clientWidth - 100) / tokens.length >= LETTER_PIXELS;
  const step = Math.max(1, tickStep(tokens.length));
  const axis = (spelled) => {
    const shown = spelled ? places : places.filter((at) => at % step === 0);
    const ticktext = shown.map((at) => (spelled ? short[at] : String(positionOf(tokens[at]))));
    return { tickvals: shown, ticktext, tickfont: { size: 10 }, range: [-0.5, tokens.length - 0.5] };
  };
  const marks = signed ? [-top, 0, top] : [0, top / 2, top];
  const trace = {
    type: "heatmap", z, zmin: signed ? -top : 0, zmax: top, colorscale: colourScale(signed), hoverongaps: false,
    text: z.map((row, query) => row.map((_, key) =>
      `query ${positionOf(tokens[query])} ${names[query]}<br>key ${positionOf(tokens[key])} ${names[key]}`)),
    hovertemplate: `%{text}<br>${plotlyText(title)}: %{z:.4g}<extra></extra>`,
    colorbar: { orientation: "h", thickness: 9, outlinewidth: 0, yref: "container", y: 0, yanchor: "bottom", len: 0.82, tickfont: { size: 10 },
      tickvals: marks, ticktext: marks.map(number) }, // shorter than the map, or an end mark is clipped
  };
  const layout = plotlyLayout({
    margin: { l: down ? 94 : 46, r: 6, t: 6, b: across ? 116 : 78 },
    xaxis: { ...axis(across), tickangle: across ? -60 : 0, title: { text: "key", standoff: 2 } },
    yaxis: { ...axis(down), range: [tokens.length - 0.5, -0.5], title: { text: "query", standoff: 2 } },
  });
  Plotly.react(plot, [trace, ...(signed ? [negativeMarks(z, places, places, top)] : [])], layout, PLOTLY_CONFIG);
}

function headOptions() {
  return LAYERS[Number(factorState.layer)].heads.map((head, place) => [String(place), `head ${head}`]);
}

function buildFactorControls() {
  const sets = tokenSets(FACTOR_TOKENS);
  const changed = (name) => (value) => {
    factorState[name] = value;
    if (name === "layer") {
      factorState.head = String(mostTellingHead(LAYERS[Number(value)]));
      buildFactorControls();
    }
    drawFactors();
  };
  const controls = [
    select("Layer", layerNames().map((name, place) => [String(place), name]), factorState.layer, changed("layer")),
    select("Head", headOptions(), factorState.head, changed("head")),
  ];
  if (sets.length > 1) {
    controls.push(select("Tokens drawn", sets.map(({ label }, place) => [String(place), label]), factorState.tokens, changed("tokens")));
  }
  document.getElementById("factor-controls").replaceChildren(...controls);
}

function showFactors(place, head) {
  factorState.layer = String(place);
  factorState.head = String(LAYERS[place].heads.indexOf(head));
  buildFactorControls();
  drawFactors();
  document.getElementById("factors-section").scrollIntoView({ behavior: "smooth" });
}

function buildFactors() {
  factorState.head = String(mostTellingHead(LAYERS[Number(START)]));
  buildFactorControls();
  for (const { metric, title } of FACTORS) {
    document.getElementById("factors").append(element("div", { className: "figure" },
      element("h3", { text: title }), element("div", { className: "plot", id: `factor-${metric}` })));
  }
  whenSeen(document.getElementById("factors"), drawFactors, life);
}

if (document.getElementById("factors-section")) buildFactors();
