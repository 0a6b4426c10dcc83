// The page as it stands, as one SVG: its boxes, its texts as text, its drawings and its canvases.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const root = document.createElementNS(SVG, "svg");
  const [width, height] = [document.documentElement.clientWidth, document.documentElement.scrollHeight];
  for (const [name, value] of Object.entries({ xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}` })) root.setAttribute(name, value);
  const add = (tag, attributes, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    root.append(node);
    return node;
  };
  const place = (box) => ({ x: box.left + scrollX, y: box.top + scrollY, width: box.width, height: box.height });
  // a colour as every reader of SVG knows it, and its opacity; browsers write color-mix as color(...)
  const dot = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const paint = (name, colour) => {
    dot.clearRect(0, 0, 1, 1);
    dot.fillStyle = colour;
    dot.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = dot.getImageData(0, 0, 1, 1).data;
    return { [name]: `rgb(${red},${green},${blue})`, [name === "stop-color" ? "stop-opacity" : `${name}-opacity`]: (alpha / 255).toFixed(3) };
  };
  const clear = (colour) => colour === "transparent" || /[,/]\s*0\)$/.test(colour);
  // a colour bar: "linear-gradient(to right, ...)" of evenly spaced colours
  const gradient = (rect, image) => {
    const colours = image.startsWith("linear-gradient(to right") ? image.match(/rgba?\([^)]*\)|color\([^)]*\)/g) : null;
    if (!colours) return;
    const id = `gradient-${root.childElementCount}`;
    const made = add("linearGradient", { id });
    colours.forEach((colour, at) => {
      // SVG mixes colours before opacities: a clear stop is clear in each neighbour's colour
      const seen = clear(colour) ? [colours[at - 1], colours[at + 1]].filter(Boolean) : [colour];
      for (const one of seen) {
        const stop = document.createElementNS(SVG, "stop");
        const painted = { offset: at / (colours.length - 1), ...paint("stop-color", one), ...(clear(colour) ? { "stop-opacity": 0 } : {}) };
        for (const [name, value] of Object.entries(painted)) stop.setAttribute(name, value);
        made.append(stop);
      }
    });
    add("rect", { ...rect, fill: `url(#${id})` });
  };
  const box = (element, style) => {
    for (const rect of element.getClientRects()) {
      if (!clear(style.backgroundColor)) add("rect", { ...place(rect), ...paint("fill", style.backgroundColor) });
      gradient(place(rect), style.backgroundImage);
      const { x, y, width: w, height: h } = place(rect);
      const edges = { Top: [x, y, w, 0], Bottom: [x, y + h, w, 0], Left: [x, y, 0, h], Right: [x + w, y, 0, h] };
      for (const [side, [x1, y1, dx, dy]] of Object.entries(edges)) {
        const thick = parseFloat(style[`border${side}Width`]);
        if (!thick || style[`border${side}Style`] === "none" || clear(style[`border${side}Color`])) continue;
        add("line", { x1, y1, x2: x1 + dx, y2: y1 + dy, ...paint("stroke", style[`border${side}Color`]), "stroke-width": thick });
      }
    }
  };
  // a text node line by line: one text element for each run of letters on one line
  const text = (node, style) => {
    const range = document.createRange();
    let run = null;
    const end = () => {
      if (!run || !run.letters.trim()) return;
      const dotted = style.textDecorationLine.includes("underline") ? { "text-decoration": "underline" } : {};
      add("text", {
        x: run.x, y: run.y, ...paint("fill", style.color), "font-family": style.fontFamily, "font-size": style.fontSize,
        "font-weight": style.fontWeight, "font-style": style.fontStyle, "xml:space": "preserve", ...dotted,
      }, run.letters);
    };
    [...node.data].reduce((at, letter) => {
      range.setStart(node, at);
      range.setEnd(node, at + letter.length);
      const rect = range.getClientRects()[0];
      if (rect && rect.width) {
        const baseline = rect.top + scrollY + rect.height * 0.79;
        if (!run || Math.abs(run.y - baseline) > 2) {
          end();
          run = { x: rect.left + scrollX, y: baseline, letters: "" };
        }
        run.letters += letter;
      }
      return at + letter.length;
    }, 0);
    end();
  };
  const image = (href, rect) => add("image", { ...place(rect), href, preserveAspectRatio: "none", style: "image-rendering: pixelated" });
  const walk = (element) => {
    const style = getComputedStyle(element);
    if (style.display === "none" || style.visibility === "hidden") return;
    if (element instanceof SVGSVGElement) {
      const rect = place(element.getBoundingClientRect());
      const copy = element.cloneNode(true);
      const [from, to] = [element.querySelectorAll("*"), copy.querySelectorAll("*")];
      from.forEach((one, at) => {
        const seen = getComputedStyle(one);
        if (seen.display === "none") to[at].style.display = "none";
        for (const name of ["font-family", "font-size", "font-weight", "fill", "stroke", "opacity", "text-anchor"]) to[at].style.setProperty(name, seen.getPropertyValue(name));
      });
      for (const [name, value] of Object.entries(rect)) copy.setAttribute(name, value);
      root.append(copy);
      return;
    }
    if (element !== document.body) box(element, style);
    if (element instanceof HTMLCanvasElement) {
      image(element.toDataURL(), element.getBoundingClientRect());
      return;
    }
    for (const child of element.childNodes) {
      if (child.nodeType === Node.ELEMENT_NODE) walk(child);
      else if (child.nodeType === Node.TEXT_NODE) text(child, style);
    }
  };
  add("rect", { x: 0, y: 0, width, height, ...paint("fill", getComputedStyle(document.documentElement).backgroundColor) });
  walk(document.body);
  return new XMLSerializer().serializeToString(root);
})()
