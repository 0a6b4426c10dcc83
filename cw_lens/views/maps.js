// Layer x head maps: small multiples of the head profile.

const MAPS = [ // in the order in which they stand
  { name: "first_attention", title: "First token: attention", note: "mean over heads is the layer’s", kind: "share" },
  { name: "first_value_weighted", title: "First token: value-weighted", note: "sums over heads to the layer’s", kind: "share", range: "given" },
  { name: "first_contribution", title: "First token: contribution ĉ", note: "sums over heads to the layer’s; orange takes away", kind: "signed", range: "given" },
  { name: "first_intra_head_contribution", title: "First token: intra-head č", note: "share of the head’s own output; orange takes away", kind: "signed" },
  { name: "attention_entropy", title: "Entropy of attention", note: "nats", kind: "amount", range: "entropy" },
  { name: "value_weighted_entropy", title: "Entropy of value-weighted", note: "nats", kind: "amount", range: "entropy" },
  { name: "contribution_entropy", title: "Entropy of contribution |ĉ|", note: "nats", kind: "amount", range: "entropy" },
  { name: "gross", title: "Gross contribution Σ|ĉ|", note: "what a head gives and takes away", kind: "share", range: "output" },
  { name: "net", title: "Net contribution Σĉ", note: "a head’s share of the output; heads sum to 1", kind: "signed", range: "output" },
  { name: "sink_cosine", title: "Cosine of the first token’s value to the others’", note: "mean over the other tokens (paper, figure 5a)", kind: "signed", range: "one" },
  { name: "output_norm", title: "Length of the head’s output", note: "units of the residual stream", kind: "amount" },
];

const SHOWN_MAPS = MAPS.filter(({ name }) => !DATA.statistics.length || DATA.statistics.includes(name));

function largestOf(names) {
  let largest = 0;
  for (const name of names) for (const row of PROMPT.profile[name]) for (const value of row) largest = Math.max(largest, Math.abs(value));
  return largest || 1;
}

// Maps that name the same range share it.
function mapRange(map) {
  if (map.range === "one") return 1;
  return largestOf(map.range ? MAPS.filter((other) => other.range === map.range).map((other) => other.name) : [map.name]);
}

function drawMaps() {
  const host = document.getElementById("maps");
  for (const map of SHOWN_MAPS) {
    let plot = document.getElementById(`map-${map.name}`);
    if (!plot) {
      plot = element("div", { className: "plot", id: `map-${map.name}` });
      host.append(element("div", { className: "figure" },
        element("h3", { text: map.title }), element("p", { className: "note", text: map.note }), plot));
    }
    drawMap(plot, map);
  }
}

function drawMap(plot, map) {
  const values = PROMPT.profile[map.name];
  const layers = PROMPT.profile_layers;
  const top = mapRange(map);
  const marks = map.kind === "signed" ? [-top, 0, top] : [0, top / 2, top];
  const trace = {
    type: "heatmap", x: layers.map(String), y: values[0].map((_, head) => head),
    z: values[0].map((_, head) => values.map((row) => row[head])),
    zmin: map.kind === "signed" ? -top : 0, zmax: top,
    colorscale: map.kind === "amount" ? "Cividis" : colourScale(map.kind === "signed"),
    reversescale: map.kind === "amount" && !darkness.matches, // more stands further from the paper
    colorbar: { thickness: 9, outlinewidth: 0, len: 1, tickfont: { size: 10 }, tickvals: marks, ticktext: marks.map(number) },
    hovertemplate: `layer %{x}, head %{y}<br>${plotlyText(map.title)}: %{z:.4g}<extra></extra>`,
  };
  const layout = plotlyLayout({
    margin: { l: 34, r: 4, t: 6, b: 34 },
    // as names, so that layers that were not read leave no gap
    xaxis: { type: "category", title: { text: "layer", standoff: 4 }, tickangle: 0, dtick: tickStep(layers.length) },
    yaxis: { title: { text: "head", standoff: 4 }, autorange: "reversed", dtick: tickStep(values[0].length) },
  });
  const dots = map.kind === "signed" ? [negativeMarks(trace.z, trace.x, trace.y, top)] : [];
  Plotly.react(plot, [trace, ...dots], layout, PLOTLY_CONFIG);
  if (plot.dataset.listening) return;
  plot.dataset.listening = "yes";
  plot.on("plotly_click", (event) => openHead(Number(event.points[0].x), event.points[0].y));
}

function tickStep(count) {
  return [1, 2, 5, 10, 20].find((step) => count / step <= 8) ?? 50;
}

// Shows a clicked head in the factor view, where the page holds it.
function openHead(layerIndex, head) {
  const place = LAYERS.findIndex((layer) => layer.index === layerIndex);
  if (place < 0 || !LAYERS[place].heads.includes(head)) return;
  if (document.getElementById("factors-section")) showFactors(place, head);
}

if (document.getElementById("maps-section")) whenSeen(document.getElementById("maps"), drawMaps, life);
