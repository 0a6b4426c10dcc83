// In the notebook's own document: hands libraries to the frames that ask, and fits their height.
window.cw_lens_libraries ??= {};
if (!window.cw_lens_listens) {
  window.cw_lens_listens = true;
  window.addEventListener("message", ({ data, source }) => {
    const said = data?.cw_lens;
    if (!said) return;
    const packed = window.cw_lens_libraries[said.need];
    if (packed) source.postMessage({ cw_lens: { library: said.need, packed } }, "*");
    const frame = [...document.querySelectorAll("iframe.cw-lens")].find((one) => one.contentWindow === source);
    if (frame && Number.isFinite(said.height)) frame.style.height = `${Math.min(said.height + 2, 6000)}px`;
  });
}
