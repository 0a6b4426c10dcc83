"""A manifest in words: what a run was given, what it ran on, and what its certificates prove."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from cw_lens.errors import spans
from cw_lens.stored_runs import StoredRun

_TOLD = ("cw_lens", "certificates", "recipe")
"""What stands elsewhere on the page."""
_MODEL = {
    "architecture": "architecture",
    "n_layers": "layers",
    "n_heads": "heads a layer",
    "n_key_value_heads": "key-value heads",
    "d_model": "model width",
    "d_head": "head width",
    "d_vocab": "vocabulary",
    "dtype": "computed in",
    "device": "on",
    "weights": "weights",
    "weight_hash": "sha256 of the weights",
    "class": "read through",
    "transformer_lens": "TransformerLens",
}


def fact_lines(run: StoredRun) -> list[tuple[str, str]]:
    """What the manifest says, as labelled lines in words; what is empty is left out."""
    manifest = run.manifest
    say = {
        "configuration": _configuration,
        "model": _model,
        "corpora": lambda held: _corpora(held, run),
        "tokens": lambda _held: [],  # told with the corpora
        "protected_share": _protected,
        "sink_layers": lambda held: [("Layers in which sinks are edited", spans(held))],
        "shown_layers": lambda held: [("Layers shown whole", spans(held))],
        "metrics": lambda held: [("Metrics", ", ".join(map(str, held)))],
        "tasks": _tasks,
        "prompt": _prompt,
        "versions": lambda held: [("Versions", _named(held))],
    }
    lines = []
    for name, held in manifest.items():
        if name in _TOLD or held in (None, {}, [], ""):
            continue
        try:
            lines += say[name](held) if name in say else [(_spelled(name), _value(held))]
        except (AttributeError, KeyError, TypeError, ValueError):  # of another version: as it is
            lines.append((_spelled(name), _value(held)))
    if manifest.get("cw_lens"):
        lines.append(("cw_lens", str(manifest["cw_lens"])))
    return lines


def certified(run: StoredRun) -> tuple[str, pd.DataFrame | None]:
    """What the certificates prove, in a sentence, and one row for each layer; None if there are
    none."""
    held = run.manifest.get("certificates")
    if not held:
        return "This command keeps no certificates.", None
    # an output error is None where there was no output to hold it against
    errors = [max(c["value_error"], c["output_error"] or 0.0) for c in held]
    worst, tolerance = max(errors), max(c["tolerance"] for c in held)
    layer = held[errors.index(worst)]["layer"]
    where = " on the first text" if run.manifest.get("tokens") else ""
    size = "exactly, to the last digit" if worst == 0 else f"within {worst:.1e} (layer {layer})"
    return (
        f"Σ α v W_O is the output that the model computed in each of {len(held)} layers{where}, "
        f"{size}; {tolerance:.0e} is tolerated.",
        pd.DataFrame(held),
    )


def _configuration(held: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The options, those that were left empty apart."""
    given = {
        name.replace("_", " "): _value(value)
        for name, value in held.items()
        if name != "command" and value not in (None, [], "")
    }
    said = "; ".join(f"{name}: {value}" for name, value in given.items())
    return [("Command", f"cw-lens {held['command']}"), ("Options", said)]


def _model(held: Mapping[str, Any]) -> list[tuple[str, str]]:
    parts = [f"{words} {_value(held[name])}" for name, words in _MODEL.items() if held.get(name)]
    without = held.get("layers_without_attention")
    if without:
        parts.append(f"layers without attention {spans(without)}")
    return [("Model", "; ".join([str(held["name"]), *parts]))]


def _corpora(held: list[Mapping[str, Any]], run: StoredRun) -> list[tuple[str, str]]:
    counts = run.tokens_of_texts()
    lines = []
    for corpus in held:
        texts, tokens = counts.get(corpus["name"], (0, 0))
        read = f"{texts} text{'s' * (texts != 1)}, {tokens:,} tokens with the first (BOS)"
        rows = f"rows {spans(corpus['rows'])}"
        lines.append((f"Corpus {corpus['name']}", f"{read}; {rows}; {corpus['source']}"))
    return lines


def _protected(held: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str]]:
    lines = []
    for detector, shares in held.items():
        values = list(shares.values())
        most = max(shares, key=lambda layer: shares[layer])
        lines.append(
            (
                f"Pairs that {detector} protects",
                f"{_percent(sum(values) / len(values))} of the (head, token) pairs, mean over "
                f"layers; at least {_percent(min(values))}, at most {_percent(max(values))} "
                f"(layer {most})",
            )
        )
    return lines


def _tasks(held: list[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return [
        (f"Task {task['name']}", f"{_value(task['source'])}; harness {_value(task['harness'])}")
        for task in held
    ]


def _prompt(held: Mapping[str, Any]) -> list[tuple[str, str]]:
    text = "".join(held["tokens"])
    lines = [("Text", text if len(text) <= 600 else f"{text[:600]} …")]
    lines.append(("Tokens", f"{len(held['ids'])}, the first {_first(held)}"))
    if held.get("perplexity") is not None:
        perplexity = held["perplexity"]
        lines.append(("Loss", f"{math.log(perplexity):.3f} nats a token ({perplexity:.4g})"))
    return lines


def _first(held: Mapping[str, Any]) -> str:
    return "is BOS" if held["first_is_bos"] else "is no BOS"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _spelled(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _named(held: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in held.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, str | int | float) for one in value):
        return " ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False)
