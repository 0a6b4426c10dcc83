"""The run folder: manifest, tables and page, of one command."""

import json
import math
import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

import cw_lens
from cw_lens.certificates import Certificate
from cw_lens.errors import CWLensError
from cw_lens.prompts import Prompts
from cw_lens.scores import TokenScores
from cw_lens.studies.explain import Explanation
from cw_lens.views import Page

MANIFEST = "manifest.json"
FILES = ("report.html", "token_scores.parquet", "heads.parquet", MANIFEST)


class RunFolderError(CWLensError, OSError):
    """A run folder that cannot be written, or that holds another run."""


def prepare_folder(folder: Path, configuration: dict[str, Any]) -> None:
    """Makes the folder and makes sure that it may be written and holds no other run.

    A folder that holds a run of the same configuration is written anew.

    Raises:
        RunFolderError: naming the first field in which the runs differ, or why it cannot be
            written.
    """
    elsewhere = "Give another folder with --out, or remove this one."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RunFolderError(
            f"cannot write the output folder {folder}: {error.strerror}. Give another with --out."
        ) from error
    held = [name for name in FILES if (folder / name).exists()]
    if not held:
        return
    try:
        other = json.loads((folder / MANIFEST).read_text())["configuration"]
    except (OSError, ValueError, KeyError, TypeError):
        raise RunFolderError(
            f"{folder} holds {held[0]} but no manifest that can be read. {elsewhere}"
        ) from None
    for field, value in configuration.items():
        if other.get(field) != value:
            raise RunFolderError(
                f"{folder} already holds another run: {field} was {_short(other.get(field))} "
                f"there and is {_short(value)} here. {elsewhere}"
            )


def write_explanation(
    folder: Path, explanation: Explanation, page: Page, configuration: dict[str, Any]
) -> None:
    """Writes the page, both tables and the manifest, each whole or not at all, manifest last."""
    _replace(folder / "report.html", page.html.encode())
    tables = {
        "token_scores.parquet": token_table(
            explanation.scores, explanation.prompts, explanation.sinks.tolist()
        ),
        "heads.parquet": explanation.heads.table(),
    }
    for name, table in tables.items():
        _replace(folder / name, table.to_parquet(index=False))
    _replace(folder / MANIFEST, json.dumps(manifest(explanation, configuration), indent=1).encode())


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
    packages = ("torch", "transformers", "transformer-lens", "circuitsvis", "plotly")
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
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
    }


def worst_certificate(certificates: tuple[Certificate, ...]) -> Certificate:
    """The certificate with the largest error."""
    return max(certificates, key=lambda c: c.error)


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror}. Give another folder with --out."
        ) from error


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
