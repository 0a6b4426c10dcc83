"""The run folder: manifest, tables and page, of one command."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

import cw_lens
from cw_lens.certificates import Certificate
from cw_lens.folders import MANIFEST, REPORT, replace_file, versions
from cw_lens.prompts import Prompts
from cw_lens.scores import TokenScores
from cw_lens.studies.explain import Explanation
from cw_lens.views import Page

PACKAGES = ("torch", "transformers", "transformer-lens", "plotly")
FILES = (REPORT, "token_scores.parquet", "heads.parquet", MANIFEST)


def write_explanation(
    folder: Path, explanation: Explanation, page: Page, configuration: dict[str, Any]
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
        folder / MANIFEST, json.dumps(manifest(explanation, configuration), indent=1).encode()
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


def manifest(explanation: Explanation, configuration: dict[str, Any]) -> dict[str, Any]:
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
        "versions": versions(*PACKAGES, "circuitsvis"),
    }


def worst_certificate(certificates: tuple[Certificate, ...]) -> Certificate:
    """The certificate with the largest error."""
    return max(certificates, key=lambda c: c.error)
