// The page begins here: its libraries, what is said once, and one prompt at a time.

function start() {
  for (const name of DATA.held_metrics) METRICS[name] ??= { label: name.replaceAll("_", " "), symbol: "" };
  writeFacts();
  for (const section of document.querySelectorAll("main > section")) {
    if (section.id !== "notes-section" && !DATA.sections.includes(section.id.replace("-section", ""))) section.remove();
  }
  if (document.body.className === "view") document.getElementById("notation").open = false;
  const main = document.querySelector("main");
  const pristine = main.cloneNode(true);
  let life = null;
  const choose = (place) => {
    life?.abort();
    life = new AbortController();
    drawn.clear();
    const fresh = pristine.cloneNode(true);
    document.querySelector("main").replaceWith(fresh);
    writePrompt(DATA.prompts[place]);
    showPrompt(DATA.prompts[place], life.signal);
  };
  if (DATA.prompts.length > 1) {
    const names = DATA.prompts.map((prompt, place) => [String(place), promptName(prompt, place)]);
    const box = document.getElementById("prompt-controls");
    box.hidden = false;
    box.append(select("Prompt", names, "0", (place) => choose(Number(place))));
  }
  choose(0);
  tellHeight();
  document.documentElement.dataset.state = "ready";
}

function promptName(prompt, place) {
  const text = prompt.tokens.slice(0, 12).join("").replaceAll("·", " ");
  return `${place}: ${text}${prompt.tokens.length > 12 ? "…" : ""}`;
}

loadLibraries().then(start);
