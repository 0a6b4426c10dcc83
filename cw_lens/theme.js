const DARK_COLOURS = {{dark}};
const darkness = matchMedia("(prefers-color-scheme: dark)");

// A figure's data or layout in the colours of the theme. What it was made of is left as it is.
function themed(value, dark = darkness.matches, isColour = false) {
  if (typeof value === "string") return (dark && isColour && DARK_COLOURS[value.toLowerCase()]) || value;
  if (Array.isArray(value)) return value.map((one) => themed(one, dark, isColour));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, one]) =>
    [name, themed(one, dark, isColour || /color(scale)?$/i.test(name))]));
}
