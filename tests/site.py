"""What the built site and the pages it is made of hold."""

import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])[-−+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class Page(HTMLParser):
    """The links, anchors and fetched files of one page."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        held = dict(attributes)
        self.anchors |= {held[name] for name in ("id", "name") if held.get(name)}
        link = held.get("href") or held.get("src")
        if link:
            (self.links if tag == "a" else self.fetched).append(link)


def broken_links(pages: dict[Path, Page]) -> list[str]:
    """Links of pages to files or anchors that are not in the site."""
    broken = []
    for page in pages.values():
        for link in page.links + page.fetched:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto", "data"):
                continue
            target = page.path
            if parts.path:
                target = (page.path.parent / unquote(parts.path)).resolve()
            there = target.is_file()
            if there and parts.fragment and target in pages:
                there = unquote(parts.fragment) in pages[target].anchors
            if not there:
                broken.append(f"{page.path.name}: {link}")
    return broken


def entries(inventory: Path) -> dict[str, str]:
    """The Python names of an objects.inv, and the page of each."""
    lines = zlib.decompress(inventory.read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    found = (re.fullmatch(r"(\S+) py:\S+ \S+ (\S+) .*", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and content of each code block, in order."""
    return BLOCK.findall(page.read_text())


def same_output(printed: str, shown: str) -> bool:
    """Whether words agree exactly, and numbers as far as another machine rounds."""
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", shown).split():
        return False
    numbers = zip(*(map(_number, NUMBER.findall(text)) for text in (printed, shown)), strict=True)
    return all(abs(one - other) <= max(0.02, 0.05 * abs(other)) for one, other in numbers)


def _number(text: str) -> float:
    return float(text.replace("−", "-"))
