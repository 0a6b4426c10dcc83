"""Writes docs/the-paper-reproduced.md from run folders of `cw-lens paper`.

python benchmarks/paper_page.py FOLDER [FOLDER ...]

Each table or figure is taken from the first folder that holds it. What is said of the numbers, by
hand, stands in docs/the-paper-reproduced.md under "Reading it", and is kept.
"""

import json
import math
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from cw_lens.studies.paper_items import ITEMS
from cw_lens.studies.paper_rows import verdicts

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PICTURES = DOCS / "the-paper-reproduced.md", DOCS / "paper"
READING, NEXT = "## Reading it\n", "## Every number\n"

TITLES = {
    "table1": "R² of contributions on their factors",
    "table2": "Correlations of the log factors",
    "table3": "The same R² on another corpus",
    "table4": "Weight of the first key",
    "table5": "Entropy of the weights, in nats",
    "fig3": "Comprehensiveness",
    "fig4": "Sufficiency",
    "fig5a": "Which way the sink's value points, by depth",
    "fig5b": "The norm model of a head",
    "fig6a": "The semantic cone of a head",
    "fig6b": "Short outputs inside the cone",
    "fig6c": "γ sweep of the sink's value",
    "fig7": "Joint distributions of the factors",
    "fig8": "Removal with the sinks unprotected",
    "fig9": "Removal over all layers at once",
    "fig10": "Removal within each head",
    "fig11": "The norm model of every head",
    "fig12": "Amplification by position (appendix D.6)",
}


class Run:
    """A run folder: its table, what it ran on, and its pictures."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.rows = pd.read_csv(folder / "paper.csv").fillna({"claim": "", "holds": ""})
        manifest = json.loads((folder / "manifest.json").read_text())
        self.configuration: dict[str, Any] = manifest["configuration"]
        self.tokens = pd.DataFrame(manifest["tokens"], columns=["data", "example", "tokens"])
        self.model: str = manifest["model"]["name"]

    @property
    def items(self) -> set[str]:
        """What the run was asked for."""
        wanted = set(self.configuration["items"])
        return set(ITEMS) if "all" in wanted else wanted

    def command(self, item: str) -> str:
        """What makes one item again, in any folder."""
        held = self.configuration
        words = ["cw-lens", "paper", item, "--data", *(Path(name).name for name in held["data"])]
        words += ["--examples", str(held["examples"]), "--max-tokens", str(held["max_tokens"])]
        return shlex.join(words)

    def pictures(self, item: str) -> list[Path]:
        """The pictures of an item on the run's first corpus."""
        first = self.tokens["data"].iloc[0]
        return sorted((self.folder / "figures").glob(f"{item}-{first}*.png"))

    def corpora(self) -> str:
        """Texts and tokens of each corpus."""
        groups = self.tokens.groupby("data", sort=False)["tokens"]
        return "; ".join(
            f"{name}, {len(held)} texts of {held.min()} to {held.max()} tokens, {held.sum()} in all"
            for name, held in groups
        )


def number(x: float) -> str:
    """To three decimals, nothing for what is not there."""
    return "" if math.isnan(x) else f"{x:.3f}"


def section(run: Run, item: str) -> str:
    """One table or figure: command, numbers, picture."""
    kind = item.replace("table", "Table ").replace("fig", "Figure ")
    lines = [f"### {kind}: {TITLES[item]}", "", "```console", run.command(item), "```", ""]
    rows = run.rows.loc[run.rows["item"] == item]
    if len(rows):
        lines += ["| quantity | corpus | paper | here [95 %] | claim | holds here |"]
        lines += ["|---|---|---|---|---|---|"]
    for row in rows.to_dict("records"):
        ends = "" if math.isnan(row["low"]) else f" [{number(row['low'])}, {number(row['high'])}]"
        cells = [row["quantity"], row["data"], number(row["paper"])]
        cells += [number(row["here"]) + ends, row["claim"], row["holds"]]
        lines.append("| " + " | ".join(cells) + " |")
    for picture in run.pictures(item):
        PICTURES.mkdir(exist_ok=True)
        shutil.copyfile(picture, PICTURES / picture.name)
        lines += ["", f"![{kind}: {TITLES[item]}](paper/{picture.name})"]
    return "\n".join([*lines, ""])


def page(runs: list[Run]) -> str:
    """The whole page, what was written by hand in it kept."""
    chosen = {item: next((r for r in runs if item in r.items), None) for item in ITEMS}
    held = {item: run for item, run in chosen.items() if run is not None}
    rows = [run.rows.loc[run.rows["item"] == item] for item, run in held.items()]
    before = PAGE.read_text() if PAGE.exists() else f"{READING}\n{NEXT}"
    by_hand = before.split(READING)[1].split(NEXT)[0].strip("\n")
    used = [run for run in runs if run in held.values()]
    lines = [
        "# The paper, reproduced",
        "",
        "Tables and figures of arXiv 2606.07604 on another model than the paper's, from",
        "`cw-lens paper`; written by `python benchmarks/paper_page.py`, all but *Reading it*. The",
        "paper's numbers are those of LLaMA-3.1-8B; what is to agree is the claim, not the digits.",
        "Intervals are bootstrapped over texts (95 %). A claim holds, or does not, where its",
        "interval says so; where it does not say, it is *not distinguishable*.",
        "",
        *(f"- {run.model}: {run.corpora()}." for run in used),
        "",
        "## In short",
        "",
        *(f"- {sentence}" for sentence in verdicts(pd.concat(rows))),
        "",
        READING,
        by_hand,
        "",
        NEXT,
        *(section(run, item) for item, run in held.items()),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page([Run(Path(name)) for name in sys.argv[1:]]))
