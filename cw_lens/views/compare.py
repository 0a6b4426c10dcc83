"""Two runs side by side: what changes between two prompts, or between two models."""

from collections.abc import Sequence
from typing import Any

import torch

from cw_lens.errors import InputError
from cw_lens.layer import LayerAttention
from cw_lens.runs import Run
from cw_lens.studies.explain import Explanation, explanations
from cw_lens.views.budget import ranges
from cw_lens.views.differences import (
    COMPARED,
    Alignment,
    Change,
    align,
    difference_payload,
    layer_change,
    select_changes,
    token_changes,
)
from cw_lens.views.page import Page, document
from cw_lens.views.payload import RANGE_ROOM, Ranges, certificate_rows, packed, script_json
from cw_lens.views.show import SIZE_BUDGET
from cw_lens.views.words import isolated, percent


def compare(
    run_a: Run[Any],
    run_b: Run[Any],
    *,
    names: tuple[str, str] = ("A", "B"),
    size_budget: float = SIZE_BUDGET,
) -> Page:
    """What run B has more of than run A, edge by edge and token by token, on aligned tokens.

    Two prompts of one model, or one prompt through two models. Equal runs of tokens are aligned,
    and runs of equal length that replace one another ("Paris" by "Rome"); other tokens are shown
    and not compared. Where two models differ in their number of heads, each layer is compared as a
    whole: contributions and value-weighted attention summed over heads, the rest averaged. Only
    layers that both runs hold are compared.

    Args:
        run_a, run_b: from `capture`, each of one prompt.
        names: what the page calls them.
        size_budget: what the page may take, in bytes; above it the layers, then heads, then tokens
            that differ least are left out, and the page says so.

    Raises:
        InputError: runs of several prompts, in different spaces, without a common layer or an
            aligned token, a budget too small for any page, or as `show_heads`.
    """
    a, b = _one_text(run_a, names[0]), _one_text(run_b, names[1])
    aligned = align(a.prompts.tokens[0], b.prompts.tokens[0])
    if not aligned.first:
        raise InputError("the two texts have no token in common place; nothing can be compared.")
    spaces = [{one.space for one in text.certificates} for text in (a, b)]
    if spaces[0] != spaces[1]:
        raise InputError(
            f"run {names[0]} was measured in {'/'.join(sorted(spaces[0]))} space and run "
            f"{names[1]} in {'/'.join(sorted(spaces[1]))} space; capture both with one space=."
        )
    second = {layer.index: layer for layer in b.layers}
    pairs = [(layer, second[layer.index]) for layer in a.layers if layer.index in second]
    if not pairs:
        raise InputError(
            f"the runs hold no common layer: {_numbers(a.layers)} and {_numbers(b.layers)}."
        )
    if pairs[0][0].causal != pairs[0][1].causal:
        raise InputError("one model is causal and the other is not; their edges differ in kind.")
    changes = [layer_change(*pair, aligned) for pair in pairs]
    payload = _payload(a, b, aligned, changes, names)
    omissions = _left_out(a, b, aligned, pairs)
    around = len(document(script_json(payload), ("compare", "grid"), view=True).encode())
    selection = select_changes(changes, around + sum(map(len, omissions)), size_budget)
    coloured = Ranges(COMPARED)
    payload["prompts"][0]["held_tokens"] = selection.held
    payload["prompts"][0]["layers"] = [
        difference_payload(*pair, aligned, selection, coloured)
        for pair in pairs
        if pair[0].index in selection.heads
    ]
    payload["ranges"] = coloured.payload()
    payload["omissions"] = [*omissions, *selection.omissions]
    made = document(script_json(payload), ("compare", "grid"), view=True)
    return Page(made, selection.estimated_bytes, tuple(payload["omissions"]))


def _one_text(run: Run[Any], name: str) -> Explanation:
    if len(run.prompts) != 1:
        raise InputError(
            f"run {name} holds {len(run.prompts)} prompts; compare takes runs of one. Capture "
            "each prompt by itself."
        )
    return explanations(run)[0]


def _payload(
    a: Explanation,
    b: Explanation,
    aligned: Alignment,
    changes: Sequence[Change],
    names: tuple[str, str],
) -> dict[str, Any]:
    """Everything of the page but the layers."""
    tokens_a, tokens_b = a.prompts.tokens[0], b.prompts.tokens[0]
    pairs = list(zip(aligned.first, aligned.second, strict=True))
    labels = [
        tokens_a[i] if tokens_a[i] == tokens_b[j] else f"{tokens_a[i]}→{tokens_b[j]}"
        for i, j in pairs
    ]
    start = max(changes, key=lambda change: change.heads.sum().item()).index
    layers = [change.index for change in changes]
    scores = {"a": _scores(a, layers), "b": _scores(b, layers)}
    prompt = {
        **_verdict(a, b, layers, names),
        "facts": [
            ("Difference", f"{names[1]} less {names[0]}, on {len(pairs)} aligned tokens"),
            *((f"Run {name}", _text(text)) for name, text in zip(names, (a, b), strict=True)),
        ],
        "tokens": labels,
        "positions": [str(i) if i == j else f"{i}→{j}" for i, j in pairs],
        "change": packed(token_changes(changes)),
        "ids": [f"{a.prompts.ids[0, i]}, {b.prompts.ids[0, j]}" for i, j in pairs],
        "held_tokens": None,
        "score_layers": [],
        "scores": {},
        "sinks": [],
        "profile_layers": [],
        "profile": {},
        "layers": [],
        "compared": {
            "names": list(names),
            "tokens": {"a": list(tokens_a), "b": list(tokens_b)},
            "aligned": {"a": list(aligned.first), "b": list(aligned.second)},
            "score_layers": layers,
            "scores": scores,
        },
    }
    return {
        "title": f"{names[1]} less {names[0]}",
        "difference": f"{names[1]} less {names[0]}",
        "recipe": None,
        "sections": ["compare", "grid"],
        "metrics": list(COMPARED),
        "text_metrics": [],
        "ranges": dict.fromkeys(COMPARED, RANGE_ROOM),  # until the edges are read
        "held_metrics": list(COMPARED),
        "signed": list(COMPARED),
        "told": list(COMPARED),
        "statistics": [],
        "start_layer": start,
        "start_query": None,
        "certificates": [
            [*row, name]
            for name, text in zip(names, (a, b), strict=True)
            for row in certificate_rows(text.certificates)
        ],
        "prompts": [prompt],
    }


def _scores(text: Explanation, layers: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    """Token scores of each common layer, mean over heads."""
    rows = [text.scores.layers.index(layer) for layer in layers]
    return {
        name: [packed(text.scores[name][0, row].mean(dim=0)) for row in rows]
        for name in text.scores.metrics
    }


def _verdict(
    a: Explanation, b: Explanation, layers: Sequence[int], names: tuple[str, str]
) -> dict[str, str]:
    def first(text: Explanation) -> tuple[str, str]:
        heads = text.heads
        rows = torch.tensor([heads.layers.index(layer) for layer in layers])
        return (
            percent(heads.first_attention[rows].mean().item()),
            percent(heads.first_contribution[rows].sum(dim=1).mean().item()),
        )

    (attention_a, given_a), (attention_b, given_b) = first(a), first(b)
    return {
        "verdict": f"{names[1]} less {names[0]}",
        "detail": f"The first token receives {attention_a} of the attention and gives {given_a} "
        f"of the output in {names[0]}, {attention_b} and {given_b} in {names[1]} (means over "
        "the layers compared and their queries; attention averaged and contributions summed over "
        "heads).",
    }


def _text(text: Explanation) -> str:
    tokens = text.prompts.tokens[0]
    shown = "".join(tokens[:24]) + ("…" if len(tokens) > 24 else "")
    return f"{len(tokens)} tokens: {isolated(shown)}"


def _left_out(
    a: Explanation,
    b: Explanation,
    aligned: Alignment,
    pairs: Sequence[tuple[LayerAttention, LayerAttention]],
) -> list[str]:
    said = []
    for text, taken, name in ((a, aligned.first, "first"), (b, aligned.second, "second")):
        gone = sorted(set(range(len(text.prompts.tokens[0]))) - set(taken))
        if gone:
            said.append(f"Edges of tokens {ranges(gone)} of the {name} text, aligned with none.")
    common = {layer.index for layer, _ in pairs}
    alone = sorted({layer.index for layer in (*a.layers, *b.layers)} - common)
    if alone:
        said.append(f"Layers {ranges(alone)}, which only one of the runs holds.")
    if any(one.pattern.shape[1] != other.pattern.shape[1] for one, other in pairs):
        said.append(
            "Single heads: the models have different numbers of them. Contributions and "
            "value-weighted attention are summed over heads, the rest averaged."
        )
    return said


def _numbers(layers: Sequence[LayerAttention]) -> str:
    return ranges(sorted(layer.index for layer in layers))
