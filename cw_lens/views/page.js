"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const POSITIVE = "#2166ac", NEGATIVE = "#b2182b";
  const NAMES = {
    attention: "attention", value_weighted: "value-weighted",
    value_weighted_output_normalized: "value-weighted, output-normalised",
    contribution: "contribution", signed_contribution: "signed contribution",
    intra_head_contribution: "intra-head contribution", output_distance: "output distance (ALTI)",
    stream_contribution: "stream contribution", gradient: "gradient", random: "random",
  };
  const byId = (id) => document.getElementById(id);
  const make = (tag, text, attributes = {}) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };
  const number = (x) => x === 0 ? "0" : Math.abs(x) >= 0.001 && Math.abs(x) < 1000
    ? Number(x.toPrecision(3)).toString() : x.toExponential(1);
  // plotly reads tags in its labels: a token must stay a token
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const options = (select, pairs) => {
    select.replaceChildren(...pairs.map(([value, text]) => make("option", text, { value })));
  };
  const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
  const ink = () => getComputedStyle(document.body).color;

  // ---- header and footer
  byId("verdict").textContent = data.verdict;
  for (const [name, value] of data.facts) byId("facts").append(make("dt", name), make("dd", value));
  if (data.omissions.length) {
    byId("omissions").hidden = false;
    byId("omissions").textContent = "Left out to keep the page small: " + data.omissions.join("; ") + ".";
  }
  byId("recipe").textContent = data.recipe;
  byId("ids").textContent = data.ids.map((id, i) => `${id} ${data.tokens[i]}`).join(" | ");
  for (const row of data.certificates) {
    const line = make("tr");
    line.append(...row.map((cell) => make("td", String(cell))));
    byId("certificates").append(line);
  }

  // ---- the coloured text
  const metrics = Object.keys(data.meanScores);
  const scoresOf = (metric, layer) =>
    layer === "mean" ? data.meanScores[metric] : data.layerScores[metric][Number(layer)];
  const tint = (share) => {
    const color = share < 0 ? "178,24,43" : "33,102,172";
    return `rgba(${color},${Math.min(1, Math.abs(share)).toFixed(3)})`;
  };
  function drawText(box, bar, metric) {
    const values = scoresOf(metric, byId("text-layer").value);
    const counted = byId("text-rest").checked && values.length > 1 ? values.slice(1) : values;
    const top = Math.max(...counted.map(Math.abs)) || 1;
    const signed = values.some((v) => v < 0);
    const other = metric === "attention" ? byId("text-metric").value : "attention";
    const others = scoresOf(other, byId("text-layer").value);
    box.replaceChildren(...data.tokens.map((token, i) => {
      const share = values[i] / top;
      const span = make("span", token, {
        title: `${token}\nposition ${i}, id ${data.ids[i]}\n${NAMES[metric] || metric}: ${number(values[i])}`
          + `\n${NAMES[other] || other}: ${number(others[i])}\nsink in ${data.sinkLayers[i]} of ${data.layerCount} layers`,
        style: `background:${tint(share)}`,
      });
      if (Math.abs(share) > 0.55) span.classList.add("strong");
      if (data.sinkLayers[i] * 2 >= data.layerCount) span.classList.add("sink");
      return span;
    }));
    const low = signed ? tint(-1) : "transparent";
    bar.replaceChildren(
      make("span", signed ? number(-top) : "0"),
      make("i", "", { style: `background:linear-gradient(90deg,${low},transparent ${signed ? 50 : 0}%,${tint(1)})` }),
      make("span", number(top) + (counted === values ? "" : " (first token beyond the scale)")));
  }
  function drawTexts() {
    const metric = byId("text-metric").value;
    byId("text-metric-name").textContent = NAMES[metric] || metric;
    drawText(byId("text-attention"), byId("bar-attention"), "attention");
    drawText(byId("text-other"), byId("bar-other"), metric);
  }
  const perLayer = data.layerScores.attention.length
    ? data.layerScores.attention.map((_, i) => [i, `layer ${i}`]) : [];
  options(byId("text-layer"), [["mean", "mean over layers"], ...perLayer]);
  options(byId("text-metric"), metrics.filter((m) => m !== "attention").map((m) => [m, NAMES[m] || m]));
  byId("text-metric").value = "contribution";
  for (const id of ["text-layer", "text-metric", "text-rest"]) byId(id).addEventListener("change", drawTexts);

  // ---- heat maps
  function heatmap(box, { z, title, low, high, signed, xTitle, yTitle, ticks, hover, height }) {
    const scale = signed
      ? [[0, NEGATIVE], [0.5, isDark() ? "#2a2e33" : "#ffffff"], [1, POSITIVE]] : "Viridis";
    const axis = (name) => ({
      title: { text: name, standoff: 4 }, automargin: true, showgrid: false, zeroline: false,
      ...(ticks ? { tickvals: ticks.map((_, i) => i), ticktext: ticks, tickangle: name === xTitle ? 60 : 0 } : {}),
    });
    Plotly.react(box, [{
      type: "heatmap", z, zmin: low, zmax: high, colorscale: scale, text: hover,
      hovertemplate: hover ? "%{text}<extra></extra>" : `${xTitle} %{x}, ${yTitle} %{y}: %{z:.4g}<extra></extra>`,
      colorbar: { thickness: 8, len: 1, outlinewidth: 0, tickfont: { size: 10 } },
    }], {
      title: { text: title, font: { size: 13 } }, height, margin: { l: 44, r: 8, t: 32, b: 40 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink(), size: 10 },
      xaxis: axis(xTitle), yaxis: { ...axis(yTitle), autorange: "reversed" },
    }, { displaylogo: false, responsive: true, displayModeBar: false });
  }
  const MAPS = [
    ["first_attention", "first token: attention"],
    ["first_value_weighted", "first token: value-weighted"],
    ["first_contribution", "first token: contribution", true],
    ["first_intra_head_contribution", "first token: intra-head", true],
    ["attention_entropy", "attention entropy (nats)"],
    ["value_weighted_entropy", "value-weighted entropy (nats)"],
    ["contribution_entropy", "|contribution| entropy (nats)"],
    ["gross", "gross contribution Σ|ĉ|"],
    ["net", "net contribution Σĉ", true],
    ["output_norm", "length of the head's output"],
  ];
  const extent = (rows) => Math.max(...rows.map((row) => Math.max(...row.map(Math.abs)))) || 1;
  function drawMaps() {
    if (!byId("maps").children.length) {
      byId("maps").append(...MAPS.map(([name]) => make("div", "", { id: `map-${name}` })));
    }
    for (const [name, title, signed] of MAPS) {
      const z = data.heads[name];
      const high = name === "first_attention" ? 1 : extent(z);
      heatmap(byId(`map-${name}`), { z, title, low: signed ? -high : 0, high, signed, xTitle: "head", yTitle: "layer", height: 250 });
    }
  }

  // ---- unpacking the triangles of a layer
  const T = data.shownTokens.length;
  const shownNames = data.shownTokens.map((i) => data.tokens[i]);
  const unpacked = new Map();
  function unpack({ scale, data: text }) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const steps = new DataView(bytes.buffer);
    const count = bytes.length / 2 / (T * (T + 1) / 2);
    let at = 0;
    return Array.from({ length: count }, () => Array.from({ length: T }, (_, query) => {
      const row = new Array(T).fill(0);
      for (let key = 0; key <= query; key++, at += 2) row[key] = steps.getInt16(at, true) / data.steps * scale;
      return row;
    }));
  }
  const map3 = (heads, f) => heads.map((rows, h) => rows.map((row, q) => row.map((x, k) => f(x, h, q, k))));
  function matrices(layer) {
    if (!unpacked.has(layer.index)) {
      const attention = unpack(layer.attention), signed = unpack(layer.signed);
      unpacked.set(layer.index, {
        attention, signed, intra: unpack(layer.intra), cosine: unpack(layer.cosine),
        value_weighted: map3(attention, (a, h, q, k) => a * layer.valueNorm[h][k]),
        contribution: map3(signed, Math.abs),
        norm: map3(attention, (a, h, q, k) => k <= q ? layer.valueNorm[h][k] / layer.outputNorm[q] : 0),
      });
    }
    return unpacked.get(layer.index);
  }

  // ---- the head grid
  const GRID = [["attention", "attention"], ["value_weighted", "value-weighted"],
    ["contribution", "contribution"], ["intra", "intra-head"], ["signed", "signed"]];
  let gridMetric = "contribution";
  const ranges = new Map();
  function rangeOf(metric) { // one range for every layer and head shown
    if (!ranges.has(metric)) {
      const sizes = data.layers.flatMap((layer) => matrices(layer)[metric].flatMap((rows) =>
        rows.flatMap((row, q) => row.slice(0, q + 1).map(Math.abs)))).sort((x, y) => x - y);
      const largest = sizes[sizes.length - 1];
      const most = sizes[Math.floor(0.99 * (sizes.length - 1))];
      ranges.set(metric, metric === "attention" ? { range: 1, largest } : { range: most || largest || 1, largest });
    }
    return ranges.get(metric);
  }
  const extent0 = (rows) => Math.max(...rows.map((row) => Math.max(...row.map(Math.abs))));
  function drawGrid() {
    const layer = data.layers[Number(byId("grid-layer").value)];
    const { range, largest } = rangeOf(gridMetric);
    for (const button of byId("grid-metric").children) button.setAttribute("aria-pressed", button.dataset.metric === gridMetric);
    byId("grid-note").textContent = "Hover a small map to see it large, click to lock it. Colours run from "
      + `${number(-range)} to ${number(range)}, the same for every head and layer shown`
      + (largest > range ? `; the strongest 1 % of cells lie beyond, up to ${number(largest)}.` : ".")
      + (T < data.tokens.length ? ` Shown are the ${T} strongest of ${data.tokens.length} tokens.` : "");
    const bar = make("span", "", { class: "bar" });
    bar.append(make("span", number(-range)),
      make("i", "", { style: `background:linear-gradient(90deg,${NEGATIVE},#fff,${POSITIVE});width:16rem` }),
      make("span", number(range)));
    byId("grid-bar").replaceChildren(bar);
    const target = make("div", "", { id: `grid-${layer.index}-${gridMetric}` });
    byId("grid").replaceChildren(target);
    CircuitsVis.render(target.id, CircuitsVis.AttentionHeads, {
      attention: matrices(layer)[gridMetric], tokens: shownNames,
      attentionHeadNames: layer.heads.map((h) => `L${layer.index}H${h}`),
      minValue: -range, maxValue: range, positiveColor: POSITIVE, negativeColor: NEGATIVE, maskUpperTri: true,
    });
  }
  byId("grid-metric").append(...GRID.map(([metric, name]) => {
    const button = make("button", name, { type: "button", "data-metric": metric });
    button.addEventListener("click", () => { gridMetric = metric; drawGrid(); });
    return button;
  }));
  const layerOptions = data.layers.map((layer, i) => [i, layer.index]);
  options(byId("grid-layer"), layerOptions);
  byId("grid-layer").addEventListener("change", drawGrid);

  // ---- the three factors
  function drawFactors() {
    const layer = data.layers[Number(byId("factor-layer").value)];
    const head = Number(byId("factor-head").value);
    const all = matrices(layer);
    const [a, n, c, s] = ["attention", "norm", "cosine", "signed"].map((name) => all[name][head]);
    const seen = (rows) => rows.map((row, q) => row.map((x, k) => k <= q ? x : null));
    const hover = a.map((row, q) => row.map((_, k) => k > q ? "" :
      `query ${plain(shownNames[q])} (${data.shownTokens[q]})<br>key ${plain(shownNames[k])} (${data.shownTokens[k]})`
      + `<br>attention ${number(a[q][k])}<br>relative norm ${number(n[q][k])}<br>cosine ${number(c[q][k])}<br>contribution ${number(s[q][k])}`));
    const ticks = T <= 48 ? shownNames.map(plain) : null;
    const views = [["attention", a, 1], ["relative norm", n, extent0(n) || 1], ["cosine", c, 1, true],
      ["contribution (their product)", s, extent0(s) || 1, true]];
    while (byId("factors").children.length < views.length) {
      byId("factors").append(make("div", "", { id: `factor-${byId("factors").children.length}` }));
    }
    views.forEach(([title, z, high, signed], i) => {
      heatmap(byId(`factor-${i}`), { z: seen(z), title, low: signed ? -high : 0, high, signed, xTitle: "key", yTitle: "query", ticks, hover, height: 340 });
    });
  }
  function fillHeads() {
    const layer = data.layers[Number(byId("factor-layer").value)];
    options(byId("factor-head"), layer.heads.map((h, i) => [i, h]));
    drawFactors();
  }
  options(byId("factor-layer"), layerOptions);
  byId("factor-layer").addEventListener("change", fillHeads);
  byId("factor-head").addEventListener("change", drawFactors);

  drawTexts();
  drawMaps();
  drawGrid();
  fillHeads();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawMaps(); drawFactors(); });
  document.body.dataset.ready = "true";
})();
