// The head of the page and its notes: sentences, certificates, exact tokens.

function writeFacts() {
  document.title = DATA.title;
  if (DATA.omissions.length) writeOmissions();
  if (DATA.recipe) {
    const recipe = document.getElementById("recipe");
    recipe.hidden = false;
    recipe.querySelector("pre").textContent = DATA.recipe;
  }
  writeCertificates();
}

// What is said of one prompt: its headline, its exact tokens.
function writePrompt(prompt) {
  document.getElementById("verdict").textContent = prompt.verdict;
  document.getElementById("detail").textContent = prompt.detail;
  const list = document.getElementById("facts");
  list.replaceChildren();
  for (const [label, text] of prompt.facts) list.append(element("dt", { text: label }), element("dd", { text }));
  const lines = prompt.tokens.map((token, position) => `${prompt.positions?.[position] ?? position}\t${prompt.ids[position]}\t${token}`);
  document.getElementById("token-table").textContent = ["position\tid\ttoken", ...lines].join("\n");
}

function writeOmissions() {
  for (const box of [document.getElementById("omissions"), ...document.querySelectorAll(".omitted")]) {
    box.hidden = false;
    box.append(element("p", { text: "Left out of this page:" }));
    for (const text of DATA.omissions) box.append(element("p", { text }));
  }
}

function writeCertificates() {
  const table = document.getElementById("certificates");
  const named = DATA.certificates.some((row) => row.length > 7); // of two runs
  const names = ["Layer", ...(named ? ["Run"] : []), "Value error", "Output error", "Tolerance", "Low outputs", "Dtype", "Space"];
  const head = element("tr");
  for (const text of names) head.append(element("th", { text }));
  table.append(element("thead", {}, head));
  const body = element("tbody");
  for (const [layer, value, output, tolerance, low, dtype, space, run] of DATA.certificates) {
    const row = element("tr");
    for (const text of [layer, ...(named ? [run] : []), number(value), output === null ? "not checked" : number(output), number(tolerance), low, dtype, space]) {
      row.append(element("td", { text }));
    }
    body.append(row);
  }
  table.append(body);
}
