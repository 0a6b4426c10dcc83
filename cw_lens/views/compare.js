// Two texts, each token coloured by how its share of its text changes from the first to the second.

const compareState = { layer: "mean", metric: "contribution", here: null };
const compareLines = {};

// Shares of one text's tokens by the chosen metric, in one layer or as the mean over layers.
function textShares(run) {
  const rows = PROMPT.compared.scores[run][compareState.metric].map(decode);
  if (compareState.layer !== "mean") return shares(rows[Number(compareState.layer)]);
  const mean = new Float32Array(rows[0].length);
  for (const row of rows) row.forEach((value, token) => { mean[token] += value / rows.length; });
  return shares(mean);
}

function drawCompared() {
  const { aligned } = PROMPT.compared;
  const [a, b] = [textShares("a"), textShares("b")];
  const changes = aligned.a.map((token, pair) => b[aligned.b[pair]] - a[token]);
  const top = Math.max(...changes.map(Math.abs), 1e-9);
  Object.assign(compareState, { a, b, changes });
  for (const [run, box] of Object.entries(compareLines)) {
    for (const node of box.querySelectorAll(".token")) {
      const pair = aligned[run].indexOf(Number(node.dataset.token));
      const change = pair < 0 ? 0 : changes[pair];
      const deep = Math.sqrt(Math.min(1, Math.abs(change) / top));
      const colour = change < 0 ? "var(--negative)" : "var(--positive)";
      node.style.setProperty("--fill", `color-mix(in srgb, ${colour} ${(100 * deep).toFixed(1)}%, transparent)`);
      node.classList.toggle("strong", deep > (darkness.matches ? 0.62 : 0.8));
      node.classList.toggle("negative", change < 0 && deep > 0.1);
      node.classList.toggle("unaligned", pair < 0);
    }
  }
  const half = `${percent(top / 4)}`;
  const bar = colourBar("linear-gradient(to right, var(--negative), transparent, var(--positive))",
    [[0, percent(-top)], [0.25, `−${half}`], [0.5, "0"], [0.75, half], [1, percent(top)]],
    "Change of a token’s share of its text, square-root scale. Struck-out tokens are aligned with none.");
  document.getElementById("compare-bar").replaceChildren(bar);
  if (compareState.here) tellPair(...compareState.here);
}

function tellPair(run, token) {
  compareState.here = [run, token];
  const { aligned, tokens, names } = PROMPT.compared;
  const pair = aligned[run].indexOf(token);
  const box = document.getElementById("compare-readout");
  const name = (of, at) => element("bdi", {}, element("b", { text: tokens[of][at] }));
  if (pair < 0) {
    box.replaceChildren(name(run, token), ` · position ${token} of ${run === "a" ? names[0] : names[1]}: aligned with no token.`);
    return;
  }
  const [i, j] = [aligned.a[pair], aligned.b[pair]];
  box.replaceChildren(
    `${names[0]} `, name("a", i), ` at ${i}: ${percent(compareState.a[i])} · ${names[1]} `, name("b", j),
    ` at ${j}: ${percent(compareState.b[j])} · change ${percent(compareState.changes[pair])} (${metricLabel(compareState.metric)})`);
}

function buildCompared() {
  const { compared } = PROMPT;
  const set = (name) => (value) => { compareState[name] = value; drawCompared(); };
  const layers = [["mean", "mean over layers"], ...compared.score_layers.map((layer, row) => [String(row), `layer ${layer}`])];
  document.getElementById("compare-controls").append(
    select("Layer", layers, compareState.layer, set("layer")),
    select("Metric", Object.keys(compared.scores.a).map((name) => [name, metricLabel(name)]), compareState.metric, set("metric")));
  ["a", "b"].forEach((run, place) => {
    const box = element("div", { className: "line", id: `compare-${run}` });
    compared.tokens[run].forEach((text, token) => {
      box.append(element("span", { className: "token", text, "data-token": token }),
        text.includes("↵") ? element("br") : element("wbr"));
    });
    for (const kind of ["mouseover", "click"]) {
      box.addEventListener(kind, (event) => {
        if (event.target.dataset.token !== undefined) tellPair(run, Number(event.target.dataset.token));
      });
    }
    compareLines[run] = box;
    document.getElementById("compare-lines").append(
      element("p", { className: "line-name" }, element("b", { text: compared.names[place] })), box);
  });
  drawCompared();
  drawn.add(drawCompared);
}

if (document.getElementById("compare-section")) buildCompared();
