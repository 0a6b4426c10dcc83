"""Takes the picture of one page in a headless browser; a program of its own (see `browsers`)."""

import asyncio
import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

import choreographer

DRAWN = """(async () => {
  const wait = (time) => new Promise((next) => setTimeout(next, time));
  const until = async (done) => { while (!done()) await wait(50); };
  const page = document.documentElement;
  page.classList.add("picture");
  dispatchEvent(new Event("beforeprint"));
  dispatchEvent(new Event("resize"));
  await document.fonts.ready;
  const plots = [...document.querySelectorAll(".plot")];
  await until(() => plots.every((plot) => plot.querySelector(".main-svg")));
  await wait(600); // circuitsvis says nothing when it has drawn
  return page.scrollHeight;
})()"""
"""Draws every part of a page, and gives its height."""


async def take(browser: str, url: str, path: str, width: int) -> None:
    """Writes the page at `url` to `path`, in the format of its ending."""
    async with choreographer.Browser(path=browser, headless=True, enable_sandbox=False) as driver:
        tab: Any = await driver.create_tab(url)

        async def send(command: str, **params: Any) -> dict[str, Any]:
            reply = await tab.send_command(command, params=params)
            if "error" in reply:
                raise RuntimeError(reply["error"]["message"])
            return reply["result"]

        async def evaluated(script: str) -> Any:
            reply = await send(
                "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
            )
            if "exceptionDetails" in reply:
                raise RuntimeError(reply["exceptionDetails"]["exception"]["description"])
            return reply["result"].get("value")

        light = {"name": "prefers-color-scheme", "value": "light"}
        await send("Emulation.setEmulatedMedia", media="screen", features=[light])
        size = {"width": width, "deviceScaleFactor": 2, "mobile": False}
        await send("Emulation.setDeviceMetricsOverride", height=900, **size)
        while await evaluated("document.documentElement?.dataset.state ?? null") != "ready":
            await asyncio.sleep(0.05)
        height = await evaluated(DRAWN)
        await send("Emulation.setDeviceMetricsOverride", height=height, **size)
        match Path(path).suffix:
            case ".png":
                content = base64.b64decode((await send("Page.captureScreenshot"))["data"])
            case ".pdf":
                paper = {"paperWidth": width / 96, "paperHeight": (height + 1) / 96}
                margins = dict.fromkeys(
                    ("marginTop", "marginBottom", "marginLeft", "marginRight"), 0
                )
                printed = await send("Page.printToPDF", printBackground=True, **paper, **margins)
                content = base64.b64decode(printed["data"])
            case _:
                script = Path(__file__).with_name("to_svg.js").read_text(encoding="utf-8")
                content = (await evaluated(script)).encode()
        Path(path).write_bytes(content)


if __name__ == "__main__":
    try:
        asyncio.run(take(**json.load(sys.stdin)))
    except BaseException as error:  # noqa: BLE001  whatever it was, one line is what helps
        sys.stdout.write(
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
        sys.stdout.flush()
        os._exit(1)  # threads that wait for the browser would keep this process alive
