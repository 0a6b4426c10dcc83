// The page of studies: sentences, figures, and tables that sort and can be taken along.

const PAGE = JSON.parse(document.getElementById("data").textContent);
const FIRST_ROWS = 15;
const LONG = 40; // rows from which on a table scrolls in its own frame
const WORDS = 28; // letters from which on a text may take several lines
const WIDTHS = [480, 540]; // pixels between which a figure fits its column

function sentenceList(sentences, className) {
  const list = element("ul", { className: `sentences ${className}` },
    ...sentences.map((text) => element("li", { text })));
  list.hidden = !sentences.length;
  return list;
}

function noticeBox(notices) {
  const box = element("div", { className: "notice" }, ...notices.map((text) => element("p", { text })));
  box.hidden = !notices.length;
  return box;
}

// A table's columns hold values, or numbers of values in a list that each stands in once.
function column(stored) {
  return stored.levels ? stored.values.map((place) => stored.levels[place]) : stored.values;
}

function shown(value, digits = 4) {
  if (value === null) return "–";
  if (value === true || value === false) return value ? "yes" : "no";
  if (typeof value !== "number") return value;
  const size = Math.abs(value);
  const sign = value < 0 ? "−" : "";
  if (Number.isInteger(value)) return sign + (size >= 1e3 ? size.toLocaleString("en") : String(size));
  const text = size >= 1e3 && size < 1e6 ? Math.round(size).toLocaleString("en")
    : size >= 1e-3 && size < 1e6 ? String(Number(size.toPrecision(digits))) : size.toExponential(1);
  return sign + text;
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

// One cell: a value, and where it has one its interval, with all its digits in the tip.
function cell(place, row, columns) {
  const value = columns[place.column][row];
  const number = typeof value === "number";
  const words = typeof value === "string" && value.length > WORDS;
  const node = element("td", { className: number ? "number" : words ? "words" : "" });
  node.append(shown(value, place.low === undefined ? 4 : 3));
  if (typeof value === "string") node.dir = "auto";
  if (!number || place.low === undefined) return node;
  const [low, high] = [columns[place.low][row], columns[place.high][row]];
  const texts = place.n === null ? "" : `, n = ${columns[place.n][row]}`;
  if (low === null || high === null) return node;
  node.append(" ", element("span", { className: "interval", text: `[${shown(low, 3)}, ${shown(high, 3)}]` }));
  node.title = `${value} [${low}, ${high}]${texts}`;
  return node;
}

// A shadow at the side to which a frame scrolls on, and how many columns are hidden there.
function watchScroll(frame, inner, hint) {
  const look = () => {
    const right = inner.scrollWidth - inner.clientWidth - inner.scrollLeft;
    frame.classList.toggle("more-right", right > 2);
    frame.classList.toggle("more-left", inner.scrollLeft > 2);
    const heads = [...inner.querySelectorAll("thead th")];
    if (heads.length) frame.style.setProperty("--first", `${heads[0].offsetWidth}px`);
    const edge = inner.getBoundingClientRect().right;
    const hidden = heads.filter((head) => head.getBoundingClientRect().right > edge + 2).length;
    if (hint) {
      hint.hidden = right <= 2;
      hint.textContent = `${hidden} more column${hidden === 1 ? "" : "s"} to the right: scroll →`;
    }
  };
  inner.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(inner);
}

function table(stored, level) {
  const names = stored.columns.map((one) => one.name);
  const columns = stored.columns.map(column);
  const count = columns.length ? columns[0].length : 0;
  let rows = [...Array(count).keys()];
  let whole = count <= FIRST_ROWS + 3;
  const body = element("tbody");
  const more = element("button", { type: "button", className: "more" });
  more.hidden = whole;
  const inner = element("div", { className: "rows", tabIndex: 0 });
  const frame = element("div", { className: "scrolls" }, inner);
  const hint = element("p", { className: "hint" });
  hint.hidden = true;
  const fill = () => {
    body.replaceChildren(...rows.slice(0, whole ? count : FIRST_ROWS).map((row) =>
      element("tr", {}, ...stored.shown.map((place) => cell(place, row, columns)))));
    more.textContent = whole ? `Show the first ${FIRST_ROWS}` : `Show all ${count.toLocaleString("en")} rows`;
    frame.classList.toggle("long", whole && count > LONG);
  };
  more.addEventListener("click", () => { whole = !whole; fill(); });
  const heads = stored.shown.map((place) => {
    const { name, meaning } = stored.columns[place.column];
    const values = columns[place.column];
    const number = values.some((value) => typeof value === "number");
    const head = element("th", { scope: "col", className: number ? "number" : "" });
    const button = element("button", { type: "button", text: name.replaceAll("_", " ") });
    if (meaning) button.title = meaning;
    button.addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      rows = order(values, direction);
      fill();
    });
    head.append(button);
    return head;
  });
  const download = element("button", { type: "button", className: "download", text: "Download CSV" });
  download.addEventListener("click", () => save(stored.file, csv(names, columns, rows)));
  const same = element("p", { className: "same" });
  same.hidden = !stored.same.length;
  same.append("The same in all rows: ", ...stored.same.flatMap((place, at) => [
    at ? "; " : "", `${names[place].replaceAll("_", " ")} `, element("b", { text: shown(columns[place][0]) })]), ".");
  fill();
  inner.append(element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body));
  watchScroll(frame, inner, hint);
  const about = element("p", { className: "about", text: stored.about });
  about.hidden = !stored.about;
  return element("div", { className: "table" },
    element("div", { className: "table-head" }, element(level, { text: stored.title }), download),
    about, same, hint, frame, more, legend(stored));
}

// What each column means: those that are shown, then those that are said once.
function legend(stored) {
  const places = [...stored.shown.map((place) => place.column), ...stored.same];
  const defined = places.map((place) => stored.columns[place]).filter((one) => one.meaning);
  const lines = defined.flatMap((one) => [
    element("dt", { text: one.name.replaceAll("_", " ") }), element("dd", { text: one.meaning })]);
  if (stored.shown.some((place) => place.low !== undefined)) {
    lines.push(element("dt", { text: "[ , ]" }),
      element("dd", { text: "95 % interval; point at a number for all its digits" }));
  }
  const box = element("details", { className: "legend" },
    element("summary", { text: "What the columns mean" }), element("dl", {}, ...lines));
  box.hidden = !defined.length;
  return box;
}

// A picture for a paper is light, whatever the theme of the page.
const pictureButton = {
  name: "picture", title: "Download as SVG", get icon() { return Plotly.Icons.camera; }, // read once plotly is there
  click: (plot) => Plotly.downloadImage({ data: plot.stored.data, layout: plot.stored.layout },
    { format: "svg", width: plot.stored.layout.width, height: plot.stored.layout.height, filename: "figure" }),
};
const PLOT_CONFIG = {
  displaylogo: false,
  modeBarButtonsToRemove: ["toImage", "select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
  modeBarButtonsToAdd: [pictureButton],
};

// Figures are drawn when they come near the window, and before printing; again for another theme.
function figure(stored) {
  const plot = element("div", { className: "plot" });
  plot.stored = stored.figure;
  const frame = element("div", { className: "scrolls" }, element("div", {}, plot));
  const { height, width = WIDTHS[1] } = stored.figure.layout;
  if (height) plot.style.minHeight = `${height}px`;
  let drawn = false;
  const draw = (dark) => {
    drawn = true;
    const layout = themed(stored.figure.layout, dark);
    const fits = Math.max(Math.min(WIDTHS[0], width), Math.min(width, frame.clientWidth));
    Plotly.react(plot, themed(stored.figure.data, dark), { ...layout, width: fits }, PLOT_CONFIG);
  };
  const again = () => { if (drawn) draw(); };
  new IntersectionObserver((entries, observer) => {
    if (entries.some((entry) => entry.isIntersecting)) { observer.disconnect(); draw(); }
  }, { rootMargin: "300px" }).observe(plot);
  darkness.addEventListener("change", again);
  addEventListener("beforeprint", () => draw(false));
  addEventListener("afterprint", again);
  watchScroll(frame, frame.firstChild, null);
  return element("figure", {}, frame, element("figcaption", { className: "meaning", text: stored.caption }));
}

function section(stored, id, levels) {
  const figures = element("div", { className: "figures" }, ...stored.figures.map(figure));
  figures.hidden = !stored.figures.length;
  return element("section", { id }, element(levels[0], { text: stored.heading }),
    sentenceList(stored.sentences, ""), figures, ...stored.tables.map((one) => table(one, levels[1])));
}

function proofs(stored, level) {
  const held = [element("p", { className: "meaning", text: stored.certified })];
  if (stored.certificates) {
    held.push(element("details", { className: "proofs" },
      element("summary", { text: "The certificate of each layer" }), table(stored.certificates, level)));
  }
  return held;
}

// How a study was computed: its certificates, its command, and what it ran on.
function repeat(stored, id, levels) {
  const node = element("section", { id, className: "repeat" },
    element(levels[0], { text: "How this was computed, and how to repeat it" }));
  if (stored.recipe) {
    node.append(element(levels[1], { text: "Recipe" }), element("pre", { className: "recipe", text: stored.recipe }));
  }
  if (stored.certified) node.append(element(levels[1], { text: "Certificates" }), ...proofs(stored, levels[1]));
  if (stored.facts.length) {
    node.append(element(levels[1], { text: "What it ran on" }), element("dl", { className: "facts" },
      ...stored.facts.flatMap(([label, text]) => [element("dt", { text: label }), element("dd", { text })])));
  }
  return node;
}

const contents = document.getElementById("contents");

function link(id, text, ...more) {
  return element("li", {}, element("a", { href: `#${id}`, text }), ...more);
}

function chapter(stored, number) {
  const levels = PAGE.joined ? ["h3", "h4"] : ["h2", "h3"];
  const id = `study-${number + 1}`;
  const node = element("article", { className: "chapter", id });
  if (PAGE.joined) node.append(element("h2", { text: stored.title }));
  const where = element("p", { className: "where", text: stored.folder ? `Run folder: ${stored.folder}. ` : "" });
  if (stored.link) where.append(element("a", { href: stored.link[0], text: stored.link[1] }));
  where.hidden = !stored.folder && !stored.link;
  node.append(where, sentenceList(stored.sentences, "verdict"), noticeBox(stored.notices));
  const parts = stored.sections.map((one, at) => section(one, `${id}-${at + 1}`, levels));
  parts.push(repeat(stored, `${id}-how`, levels));
  node.append(...parts);
  const entries = parts.map((part) => link(part.id, part.firstChild.textContent));
  const list = contents.querySelector("ol");
  const twice = PAGE.chapters.filter((other) => other.title === stored.title).length > 1;
  const title = twice ? `${stored.title}: ${stored.folder}` : stored.title;
  if (PAGE.joined) list.append(link(id, title, element("ol", {}, ...entries)));
  else list.append(...entries);
  return node;
}

// The entry of the part that is being read.
function followReading() {
  const links = new Map([...contents.querySelectorAll("a")].map((one) => [one.hash.slice(1), one]));
  const parts = [...links.keys()].map((id) => document.getElementById(id));
  const look = () => {
    const above = parts.filter((part) => part.getBoundingClientRect().top < 120);
    links.forEach((one) => one.removeAttribute("aria-current"));
    links.get((above.at(-1) ?? parts[0]).id).setAttribute("aria-current", "true");
  };
  addEventListener("scroll", look, { passive: true });
  look();
}

function start() {
  document.title = PAGE.title;
  document.getElementById("title").textContent = PAGE.title;
  document.getElementById("notices").append(...PAGE.notices.map((text) => element("p", { text })));
  document.getElementById("notices").hidden = !PAGE.notices.length;
  document.getElementById("chapters").append(...PAGE.chapters.map(chapter));
  if (contents.querySelectorAll("a").length > 2) {
    contents.hidden = false;
    document.body.classList.add("with-contents");
    const wide = matchMedia("(min-width: 1250px)");
    const unfold = () => { contents.querySelector("details").open = wide.matches; };
    wide.addEventListener("change", unfold);
    unfold();
    followReading();
  }
  tellHeight();
  document.documentElement.dataset.state = "ready";
}

loadLibraries().then(start);
