"""The scripts of other projects that a page draws with, packed small and put in it once."""

import base64
import gzip
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files

LIBRARIES = {
    "plotly": ("plotly", "package_data/plotly.min.js"),
    "circuitsvis": ("circuitsvis", "dist/cdn/iife.js"),
}
"""Each by the package that ships it, and its place there."""


def library_elements(names: Sequence[str]) -> str:
    """One inert script element for each library of `LIBRARIES`, unpacked and run by `loader.js`."""
    return "\n".join(
        f'<script type="text/plain" class="library" data-name="{library_id(name)}">'
        f"{packed_library(name)}</script>"
        for name in names
    )


def library_id(name: str) -> str:
    """A library's name with a digest: two versions of one are two libraries."""
    return f"{name}-{sha256(packed_library(name).encode()).hexdigest()[:8]}"


@cache
def packed_library(name: str) -> str:
    """A library as base64 of gzip: a third of its size, and nothing that HTML could misread."""
    package, path = LIBRARIES[name]
    content = files(package).joinpath(path).read_bytes()
    return base64.b64encode(gzip.compress(content, mtime=0)).decode("ascii")
