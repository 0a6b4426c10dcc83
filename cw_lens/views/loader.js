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

// The libraries of a page: packed in it, or asked of the notebook that shows it.

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length); // a plain loop is several times faster than .from
  for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
  return bytes;
}

async function unpacked(base64) {
  const stream = new Blob([bytesOf(base64)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

// A notebook holds each library once, in the output of one cell; a view in a frame asks for it.
function asked(name) {
  return new Promise((resolve) => {
    const ask = () => parent.postMessage({ cw_lens: { need: name } }, "*");
    const again = setInterval(ask, 300);
    const late = setTimeout(() => {
      document.getElementById("waiting").hidden = false;
    }, 4000);
    addEventListener("message", function hear({ data, source }) {
      if (source !== parent || data?.cw_lens?.library !== name) return; // another frame may not send scripts
      removeEventListener("message", hear);
      clearInterval(again);
      clearTimeout(late);
      document.getElementById("waiting").hidden = true;
      resolve(data.cw_lens.packed);
    });
    ask();
  });
}

async function loadLibraries() {
  for (const holder of document.querySelectorAll("script.library")) {
    const packed = holder.textContent.trim() || (await asked(holder.dataset.name));
    const script = document.createElement("script");
    script.textContent = await unpacked(packed);
    document.head.append(script);
    holder.remove();
  }
}

// Tells the notebook how tall the page is, so that its frame fits.
function tellHeight() {
  if (parent === window) return;
  new ResizeObserver(() => {
    parent.postMessage({ cw_lens: { height: document.documentElement.offsetHeight } }, "*");
  }).observe(document.documentElement);
}
