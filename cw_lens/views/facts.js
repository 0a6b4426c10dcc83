// The head of the page and its notes: sentences, certificates, exact tokens.

function writeFacts() {
  document.title = `Contribution weights · ${DATA.facts[0][1]}`;
  document.getElementById("verdict").textContent = DATA.verdict;
  document.getElementById("detail").textContent = DATA.detail;
  const list = document.getElementById("facts");
  for (const [label, text] of DATA.facts) list.append(element("dt", { text: label }), element("dd", { text }));
  if (DATA.omissions.length) writeOmissions();
  if (DATA.recipe) {
    const recipe = document.getElementById("recipe");
    recipe.hidden = false;
    recipe.querySelector("pre").textContent = DATA.recipe;
  }
  writeCertificates();
  const lines = DATA.tokens.map((token, position) => `${position}\t${DATA.ids[position]}\t${token}`);
  document.getElementById("token-table").textContent = ["position\tid\ttoken", ...lines].join("\n");
}

function writeOmissions() {
  for (const box of [document.getElementById("omissions"), ...document.querySelectorAll(".omitted")]) {
    box.hidden = false;
    box.append(element("p", { text: "Left out to keep this page small:" }));
    for (const text of DATA.omissions) box.append(element("p", { text }));
  }
}

function writeCertificates() {
  const table = document.getElementById("certificates");
  const names = ["Layer", "Value error", "Output error", "Tolerance", "Low outputs", "Dtype", "Space"];
  const head = element("tr");
  for (const text of names) head.append(element("th", { text }));
  table.append(element("thead", {}, head));
  const body = element("tbody");
  for (const [layer, value, output, tolerance, low, dtype, space] of DATA.certificates) {
    const row = element("tr");
    for (const text of [layer, number(value), number(output), number(tolerance), low, dtype, space]) {
      row.append(element("td", { text }));
    }
    body.append(row);
  }
  table.append(body);
}

writeFacts();
