"""Writes docs/what-works-where.md: doctor, run on a tiny random model of every architecture.

    python -m tests.what_works

renews the section of the transformer-lens that is installed and leaves the other as it is.
"""

import warnings
from importlib.metadata import version
from pathlib import Path

import cw_lens
from cw_lens import checks
from cw_lens.errors import CWLensError
from tests.families import FAMILIES, REFUSED, wrapped

PAGE = Path(__file__).parents[1] / "docs" / "what-works-where.md"
LINE = version("transformer-lens").rpartition(".")[0]
HEAD = """# What works where

`cw-lens doctor`, run on a tiny random model of each architecture, whose value and output biases
and norms are large. Each row is also a test: identities within 1e-4, writes that land in one query
head alone, padded batches that score as their texts alone. `python -m tests.what_works` writes
this page, and a test holds it to what doctor finds.

*Read*: every layer's parts add up to its output. *Write*: where masking and scaling of single
values goes in. *To know*: what stands between a value and the residual stream, and is part of the
numbers.
"""


def section() -> str:
    """The table of the transformer-lens that is installed."""
    lines = [
        f"## transformer-lens {LINE}",
        "",
        "| architecture | held as | read | write | left, right padding | to know |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(row(name))} |" for name in sorted([*FAMILIES, *REFUSED])]
    return "\n".join(lines) + "\n"


def row(name: str) -> tuple[str, str, str, str, str, str]:
    """One architecture's line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = wrapped(name)
        except CWLensError as error:
            return name, "", "refused", "", "", str(error)
        found = cw_lens.doctor(model)
    held = type(model).__name__
    if found["attention"].status == "refuse":
        refusal = found["attention"]
        return name, held, "refused", "", "", f"{refusal.what} {refusal.remedy}"
    read = ("sum of alpha v = z", "z W_O + b_O = output", "shares sum to 1")
    passes = all(found[feature].status == "pass" for feature in read)
    write = found["mask and scale values"]
    where = write.what.removeprefix("land ").partition(", in one")[0]
    notes = [found[f] for f in ("attention", "direction", "attention rows", "space") if f in found]
    know = [f.what for f in notes if f.status == "note" or f.what.startswith("bidirectional")]
    sides = [found[f"{side} padding"] for side in ("left", "right")]
    padding = ", ".join(side.status for side in sides)
    if sides[0].what == checks.NEVER_PADDED:
        padding = "never padded"
    return (
        name,
        held,
        "pass" if passes else "refused",
        where if write.status == "pass" else f"refused: {write.what}",
        padding,
        "; ".join(know),
    )


def page(text: str) -> str:
    """The page with this line's section renewed."""
    parts = text.split("\n## ")
    others = [f"## {part}" for part in parts[1:] if not part.startswith(f"transformer-lens {LINE}")]
    sections = sorted([*(part.rstrip() + "\n" for part in others), section()], reverse=True)
    return HEAD + "\n" + "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text() if PAGE.exists() else HEAD))
