// The page of a study: sentences, figures, and tables that sort and can be taken along.

const PAGE = JSON.parse(document.getElementById("data").textContent);
const FIRST_ROWS = 100;
const PLOT_CONFIG = {
  displaylogo: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
  toImageButtonOptions: { format: "svg" },
};

// An element; text is always set as text, never parsed.
function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") node.textContent = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function fillSentences(list, sentences) {
  list.hidden = !sentences.length;
  list.append(...sentences.map((text) => element("li", { text })));
}

// A table's columns hold values, or numbers of values in a list that each stands in once.
function column(stored) {
  return stored.levels ? stored.values.map((place) => stored.levels[place]) : stored.values;
}

function shown(value) {
  if (value === null) return "–";
  if (typeof value !== "number" || Number.isInteger(value)) return String(value).replace(/^-/, "−");
  const size = Math.abs(value);
  const text = size >= 1e-3 && size < 1e6 ? String(Number(size.toPrecision(4))) : size.toExponential(2);
  return value < 0 ? `−${text}` : text;
}

// Numbers by size, other values as text; what is missing always comes last.
function order(values, direction) {
  return values.map((_, row) => row).sort((a, b) => {
    const [x, y] = [values[a], values[b]];
    if (x === null || y === null) return (x === null) - (y === null) || a - b;
    const numbers = typeof x === "number" && typeof y === "number";
    const ahead = numbers ? x - y : String(x).localeCompare(String(y), "en");
    return direction * ahead || a - b;
  });
}

function csv(names, columns, rows) {
  const field = (value) => {
    const text = value === null ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = [names, ...rows.map((row) => columns.map((values) => values[row]))];
  return lines.map((line) => `${line.map(field).join(",")}\n`).join("");
}

function save(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  const link = element("a", { href: url, download: `${name}.csv` });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

function table(stored) {
  const names = stored.columns.map((one) => one.name);
  const columns = stored.columns.map(column);
  const count = columns.length ? columns[0].length : 0;
  const all = [...Array(count).keys()];
  let rows = all;
  let limit = FIRST_ROWS;
  const body = element("tbody");
  const more = element("button", { type: "button", className: "more" });
  const fill = () => {
    body.replaceChildren(...rows.slice(0, limit).map((row) =>
      element("tr", {}, ...columns.map((values) => element("td", {
        text: shown(values[row]), className: typeof values[row] === "number" ? "number" : "",
      })))));
    more.hidden = limit >= count;
    more.textContent = `Show all ${count.toLocaleString("en")} rows`;
  };
  more.addEventListener("click", () => { limit = count; fill(); });
  const heads = names.map((name, place) => {
    const head = element("th", { scope: "col" });
    const button = element("button", { type: "button", text: name });
    button.addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      rows = order(columns[place], direction);
      fill();
    });
    head.append(button);
    return head;
  });
  const download = element("button", { type: "button", className: "download", text: "Download CSV" });
  download.addEventListener("click", () => save(stored.file, csv(names, columns, rows)));
  fill();
  return element("div", { className: "table" },
    element("div", { className: "table-head" }, element("h3", { text: stored.title }), download),
    element("div", { className: "rows" }, element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body)),
    more);
}

// Figures are drawn when they come near the window, and before printing.
function figure(stored) {
  const plot = element("div", { className: "plot" });
  const height = stored.figure.layout.height;
  if (height) plot.style.minHeight = `${height}px`;
  let drawn = false;
  const draw = () => {
    if (drawn) return;
    drawn = true;
    Plotly.newPlot(plot, stored.figure.data, stored.figure.layout, PLOT_CONFIG);
  };
  new IntersectionObserver((entries, observer) => {
    if (entries.some((entry) => entry.isIntersecting)) { observer.disconnect(); draw(); }
  }, { rootMargin: "300px" }).observe(plot);
  addEventListener("beforeprint", draw);
  return element("figure", {}, plot, element("figcaption", { className: "meaning", text: stored.caption }));
}

function section(stored) {
  const sentences = element("ul", { className: "sentences" });
  fillSentences(sentences, stored.sentences);
  const figures = element("div", { className: "figures" }, ...stored.figures.map(figure));
  figures.hidden = !stored.figures.length;
  return element("section", {}, element("h2", { text: stored.heading }), sentences, figures,
    ...stored.tables.map(table));
}

document.title = PAGE.title;
document.getElementById("title").textContent = PAGE.title;
fillSentences(document.getElementById("sentences"), PAGE.sentences);
const notices = document.getElementById("notices");
notices.hidden = !PAGE.notices.length;
notices.append(...PAGE.notices.map((text) => element("p", { text })));
document.getElementById("sections").append(...PAGE.sections.map(section));
const recipe = document.getElementById("recipe");
recipe.hidden = !PAGE.recipe;
recipe.querySelector("pre").textContent = PAGE.recipe ?? "";
for (const [label, text] of PAGE.facts) {
  document.getElementById("facts").append(element("dt", { text: label }), element("dd", { text }));
}
