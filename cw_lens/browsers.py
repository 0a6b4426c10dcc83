"""The browser that draws pictures, where there is one, and the programs that drive it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "msedge",
)
"""Names under which a browser that kaleido can drive may be on the path."""


def find_browser() -> str | None:
    """The browser that draws images: BROWSER_PATH if it is set, or the first on the path."""
    named = os.environ.get("BROWSER_PATH")
    if named:
        return named
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def driven(program: Path, order: dict[str, Any], seconds: float) -> str | None:
    """Runs a program that drives a browser, by itself; why it failed, or None if it did not.

    A browser that hangs or fails must not take its caller along. The program reads the order as
    JSON from its input and says in one line what went wrong.
    """
    try:
        run = subprocess.run(
            [sys.executable, "-P", str(program)],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__
    if run.returncode == 0:
        return None
    return run.stdout.strip() or (run.stderr.strip().splitlines() or ["it ended early"])[-1]
