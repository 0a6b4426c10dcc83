"""The run folder of `cw-lens explain`, and its chapter on a page of several runs.

Its own page is drawn from the edges of whole layers, which no table keeps: `cw-lens report` shows
what the tables hold, and leads to it.
"""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

import cw_lens
from cw_lens.certificates import Certificate
from cw_lens.figures.panels import interval_lines, with_caption
from cw_lens.folders import MANIFEST, REPORT, replace_file, versions
from cw_lens.prompts import Prompts
from cw_lens.scores import TokenScores
from cw_lens.stored_runs import StoredRun
from cw_lens.studies.explain import Explanation
from cw_lens.study_report import how
from cw_lens.views import Page
from cw_lens.views.study_page import Chapter, Section

PACKAGES = ("torch", "transformers", "transformer-lens", "plotly")
EXPLANATION = ("token_scores", "heads")
"""The tables that the chapter is made of, by the names of their files."""
FIRST = {
    "first_attention": ("attention", "mean"),
    "first_value_weighted": ("value_weighted", "sum"),
    "first_contribution": ("contribution", "sum"),
}
"""What the first token gets or gives: its name, and how a layer is made of its heads."""
FILES = (REPORT, "token_scores.parquet", "heads.parquet", MANIFEST)


def write_explanation(
    folder: Path,
    explanation: Explanation,
    page: Page,
    configuration: dict[str, Any],
    recipe: str | None = None,
) -> None:
    """Writes the page, both tables and the manifest, each whole or not at all, manifest last."""
    replace_file(folder / REPORT, page.html.encode())
    tables = {
        "token_scores.parquet": token_table(
            explanation.scores, explanation.prompts, explanation.sinks.tolist()
        ),
        "heads.parquet": explanation.heads.table(),
    }
    for name, table in tables.items():
        replace_file(folder / name, table.to_parquet(index=False))
    replace_file(
        folder / MANIFEST,
        json.dumps(manifest(explanation, configuration, recipe), indent=1).encode(),
    )


def token_table(scores: TokenScores, prompts: Prompts, sinks: list[list[bool]]) -> pd.DataFrame:
    """One row per layer, head and token of one text; one column per metric."""
    heads = next(iter(scores.values.values())).shape[2]
    rows = [
        (layer, head, position, token_id, token, sinks[row][position])
        for row, layer in enumerate(scores.layers)
        for head in range(heads)
        for position, (token_id, token) in enumerate(
            zip(prompts.ids[0].tolist(), prompts.tokens[0], strict=True)
        )
    ]
    table = pd.DataFrame(rows, columns=["layer", "head", "position", "token_id", "token", "sink"])
    for name in scores.metrics:
        table[name] = scores[name][0].flatten().tolist()
    return table


def manifest(
    explanation: Explanation, configuration: dict[str, Any], recipe: str | None = None
) -> dict[str, Any]:
    """What is needed to know what was computed, on what, and that it added up."""
    nll = explanation.nll.double()
    return {
        "cw_lens": cw_lens.__version__,
        "configuration": configuration,
        "model": explanation.model,
        "prompt": {
            "ids": explanation.prompts.ids[0].tolist(),
            "tokens": list(explanation.prompts.tokens[0]),
            "first_is_bos": explanation.prompts.bos[0],
            "nll_sum": nll.sum().item(),
            "perplexity": math.exp(nll.mean().item()) if len(nll) else None,
        },
        "shown_layers": [layer.index for layer in explanation.layers],
        "metrics": list(explanation.scores.metrics),
        "sink_detector": "cosine",
        "space": explanation.certificates[0].space,
        "seed": 0,
        "certificates": [asdict(c) for c in explanation.certificates],
        "recipe": recipe,
        "versions": versions(*PACKAGES, "circuitsvis"),
    }


def explain_chapter(run: StoredRun) -> Chapter:
    """What the tables of a run hold: the first token by depth, the tokens, the heads."""
    scores, heads = run.tables["token_scores"], run.tables["heads"]
    by_layer = _first_by_layer(heads)
    means = {
        name: by_layer.loc[by_layer["series"] == name, "value"].mean() for name, _ in FIRST.values()
    }
    name, tokens = Path(str(run.manifest["model"]["name"])).name, scores["position"].nunique()
    first = scores.loc[scores["position"] == 0, "token"].iloc[0]
    sentences = [
        f"Over the {heads['layer'].nunique()} layers of {name} the first token, {first!r}, gets "
        f"{means['attention']:.2f} of the attention and gives {means['contribution']:.2f} of what "
        "the layers write (means over queries and layers)."
    ]
    figure = interval_lines(
        by_layer,
        x="layer",
        series="series",
        title="What the first token gets and gives, by depth",
        subtitle=f"{name}, one text of {tokens} tokens",
        x_title="layer",
        y_title="share",
        level=0.0,
    )
    with_caption(
        figure,
        f"Mean over the queries of one text of {tokens} tokens; attention is the mean over heads, "
        "the others are shares of the layer. One text has no interval.",
        run.recipe,
    )
    return Chapter(
        "What does each token of a text give?",
        [
            Section(
                "Token by token",
                figures={"first-token": figure},
                tables={"token_means": _token_means(scores), "heads": heads},
            )
        ],
        sentences=sentences,
        **how(run),
    )


def _first_by_layer(heads: pd.DataFrame) -> pd.DataFrame:
    """One row per layer and series, as `interval_lines` takes them."""
    parts = []
    for column, (name, combined) in FIRST.items():
        layers = heads.groupby("layer")[column].agg(combined)
        parts.append(pd.DataFrame({"layer": layers.index, "value": layers, "series": name}))
    return pd.concat(parts, ignore_index=True)


def _token_means(scores: pd.DataFrame) -> pd.DataFrame:
    """One row per token: the means of its scores over layers and heads."""
    scores = scores.rename(columns={"sink": "sink_share"}).drop(columns=["layer", "head"])
    means = scores.groupby(["position", "token_id", "token"]).mean()
    return pd.DataFrame(means).reset_index()


def worst_certificate(certificates: tuple[Certificate, ...]) -> Certificate:
    """The certificate with the largest error."""
    return max(certificates, key=lambda c: c.error)
