"""Draws figures in a headless browser, through kaleido; a program of its own.

A browser that hangs or fails must not take its caller along, so `write_figures` runs this file in
a process of its own, with a JSON text as its input. It says nothing where all went well.
"""

import asyncio
import json
import os
import signal
import sys
from typing import Any

import kaleido


async def draw(
    figures: list[Any], browser: str, start_seconds: float, image_seconds: float
) -> None:
    """Writes each figure to its path, in the format of the path's ending."""
    # kaleido would fetch MathJax from the network, and no figure holds a formula
    drawer = kaleido.Kaleido(path=browser, mathjax=False, timeout=image_seconds)
    try:
        async with asyncio.timeout(start_seconds):
            await drawer.open()
        await drawer.write_fig_from_object(figures, cancel_on_error=True)
        async with asyncio.timeout(start_seconds):
            await drawer.close()
    finally:
        process = getattr(drawer, "subprocess", None)
        if process is not None and process.poll() is None:
            end(process)


def end(process) -> None:
    """Ends a browser that did not close itself, with all that it started."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)  # kaleido makes it the leader of its group
    else:
        process.kill()


if __name__ == "__main__":
    try:
        asyncio.run(draw(**json.load(sys.stdin)))
    except BaseException as error:  # noqa: BLE001  whatever it was, one line is what helps
        reason = str(error.args[0] if error.args else "").split(". ")[0].strip(".")
        sys.stdout.write(f"{type(error).__name__}: {reason}".removesuffix(": "))
        sys.stdout.flush()
        os._exit(1)  # threads that wait for the browser would keep this process alive
