"""Two runs side by side: what changes between two prompts, or between two models."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor

from cw_lens.errors import InputError
from cw_lens.geometry import decompose, inter_head_contributions, intra_head_contributions
from cw_lens.layer import LayerAttention
from cw_lens.metrics import METRICS
from cw_lens.runs import Run
from cw_lens.studies.explain import Explanation, explanations
from cw_lens.views.budget import layer_bytes, ranges
from cw_lens.views.page import Page, document
from cw_lens.views.payload import DERIVED, certificate_rows, packed, script_json, triangle
from cw_lens.views.show import SIZE_BUDGET
from cw_lens.views.words import isolated, percent

COMPARED = ("signed_contribution", *(name for name in DERIVED if name != "signed_contribution"))
"""The quantities whose differences a page holds, in the order of its switch."""
_SUMMED = 1  # the number of heads where two models differ in it: each layer's mean


@dataclass(frozen=True)
class Alignment:
    """Which token of one text stands for which of another.

    Attributes:
        first, second: positions in each text, pair by pair, both ascending.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]


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
    and not compared. Where two models differ in their heads, means over heads are compared; only
    layers that both runs hold are.

    Args:
        run_a, run_b: from `capture`, each of one prompt.
        names: what the page calls them.
        size_budget: what the page may take, in bytes; above it the layers that differ least are
            left out, and the page says so.

    Raises:
        InputError: runs of several prompts, without a common layer or an aligned token, a budget
            too small for one layer, or as `show_heads`.
    """
    a, b = _one_text(run_a, names[0]), _one_text(run_b, names[1])
    aligned = align(a.prompts.tokens[0], b.prompts.tokens[0])
    if not aligned.first:
        raise InputError("the two texts have no token in common place; nothing can be compared.")
    second = {layer.index: layer for layer in b.layers}
    pairs = [(layer, second[layer.index]) for layer in a.layers if layer.index in second]
    if not pairs:
        raise InputError(
            f"the runs hold no common layer: {_numbers(a.layers)} and {_numbers(b.layers)}."
        )
    if pairs[0][0].causal != pairs[0][1].causal:
        raise InputError("one model is causal and the other is not; their edges differ in kind.")
    layers = [_difference(*pair, aligned) for pair in pairs]
    payload, omissions = _payload(a, b, aligned, layers, names), _left_out(a, b, aligned, pairs)
    around = len(document(script_json(payload), ("compare", "grid"), view=True).encode())
    kept, size = _fitting(layers, around + sum(map(len, omissions)) + 400, size_budget)
    if len(kept) < len(layers):
        gone = sorted({layer.index for layer in layers} - {layer.index for layer in kept})
        omissions.append(f"Layers {ranges(gone)}, which differ least in contribution.")
    payload["omissions"] = omissions
    payload["prompts"][0]["layers"] = [layer.payload for layer in kept]
    made = document(script_json(payload), ("compare", "grid"), view=True)
    return Page(made, size, tuple(omissions))


def align(first: Sequence[str], second: Sequence[str]) -> Alignment:
    """Equal tokens in common order, and runs of equal length in place of one another."""
    pairs: list[tuple[int, int]] = []
    for kind, i, j, k, m in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if kind == "equal" or (kind == "replace" and j - i == m - k):
            pairs += zip(range(i, j), range(k, m), strict=True)
    return Alignment(tuple(i for i, _ in pairs), tuple(j for _, j in pairs))


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer of both runs: what the page holds of it, and how much it differs."""

    index: int
    payload: dict[str, Any]
    change: float
    bytes: int


def _one_text(run: Run[Any], name: str) -> Explanation:
    if len(run.prompts) != 1:
        raise InputError(
            f"run {name} holds {len(run.prompts)} prompts; compare takes runs of one. Capture "
            "each prompt by itself."
        )
    return explanations(run)[0]


def _edges(layer: LayerAttention) -> dict[str, Tensor]:
    """Every compared quantity, [head, query, key]."""
    factors = decompose(layer)
    signed = inter_head_contributions(layer)
    output = METRICS["value_weighted_output_normalized"]
    made = {
        "attention": factors.attention,
        "value_weighted": METRICS["value_weighted"](layer),
        "value_weighted_output_normalized": output(layer),
        "contribution": signed.abs(),
        "signed_contribution": signed,
        "intra_head_contribution": intra_head_contributions(layer),
        "relative_norm": factors.relative_norm,
        "cosine": factors.cosine,
    }
    return {name: edges[0].cpu() for name, edges in made.items()}


def _difference(a: LayerAttention, b: LayerAttention, aligned: Alignment) -> _Layer:
    """B less A on the aligned tokens."""
    edges_a, edges_b = _edges(a), _edges(b)
    one = a.pattern.shape[1] == b.pattern.shape[1]
    heads = a.pattern.shape[1] if one else _SUMMED
    i, j = torch.tensor(aligned.first), torch.tensor(aligned.second)
    payload: dict[str, Any] = {
        "index": a.index,
        "causal": a.causal,
        "heads": list(range(heads)) if one else ["mean"],
    }
    change = 0.0
    for name in COMPARED:
        parts = [
            edges[name] if one else edges[name].mean(dim=0, keepdim=True)
            for edges in (edges_a, edges_b)
        ]
        of_a, of_b = parts[0][:, i][:, :, i], parts[1][:, j][:, :, j]
        difference = of_b - of_a
        payload[name] = packed(triangle(difference) if a.causal else difference)
        if name == "signed_contribution":
            change = difference.abs().sum().item()
    size = layer_bytes(heads, len(i), a.causal, matrices=len(COMPARED))
    return _Layer(a.index, payload, change, size)


def _fitting(layers: Sequence[_Layer], around: int, size_budget: float) -> tuple[list[_Layer], int]:
    """The layers that fit the page, those that change most first, and the size of it."""
    ranked = sorted(layers, key=lambda layer: -layer.change)
    kept = list(ranked)
    while kept and not around + sum(layer.bytes for layer in kept) <= size_budget:
        kept.pop()
    if not kept:
        needed = around + ranked[0].bytes
        raise InputError(
            f"a page of at most {size_budget / 1e6:.1f} MB cannot hold one layer of this "
            f"comparison, which takes {needed / 1e6 + 0.1:.1f} MB. Raise size_budget to that."
        )
    size = around + sum(layer.bytes for layer in kept)
    return sorted(kept, key=lambda layer: layer.index), size


def _payload(
    a: Explanation,
    b: Explanation,
    aligned: Alignment,
    layers: Sequence[_Layer],
    names: tuple[str, str],
) -> dict[str, Any]:
    """Everything of the page but the layers."""
    tokens_a, tokens_b = a.prompts.tokens[0], b.prompts.tokens[0]
    pairs = list(zip(aligned.first, aligned.second, strict=True))
    labels = [
        tokens_a[i] if tokens_a[i] == tokens_b[j] else f"{tokens_a[i]}→{tokens_b[j]}"
        for i, j in pairs
    ]
    start = max(layers, key=lambda layer: layer.change).index
    scores = {"a": _scores(a, layers), "b": _scores(b, layers)}
    prompt = {
        **_verdict(a, b, names),
        "facts": [
            ("Difference", f"{names[1]} less {names[0]}, on {len(pairs)} aligned tokens"),
            *((f"Run {name}", _text(text)) for name, text in zip(names, (a, b), strict=True)),
        ],
        "tokens": labels,
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
            "score_layers": [layer.index for layer in layers],
            "scores": scores,
        },
    }
    return {
        "title": f"{names[1]} less {names[0]}",
        "difference": f"{names[1]} less {names[0]}",
        "recipe": None,
        "sections": ["compare", "grid"],
        "metrics": list(COMPARED),
        "held_metrics": list(COMPARED),
        "signed": list(COMPARED),
        "told": list(COMPARED),
        "statistics": [],
        "start_layer": start,
        "start_query": None,
        "certificates": certificate_rows(a.certificates),
        "prompts": [prompt],
    }


def _scores(text: Explanation, layers: Sequence[_Layer]) -> dict[str, list[dict[str, Any]]]:
    """Token scores of each common layer, mean over heads."""
    rows = [text.scores.layers.index(layer.index) for layer in layers]
    return {
        name: [packed(text.scores[name][0, row].mean(dim=0)) for row in rows]
        for name in text.scores.metrics
    }


def _verdict(a: Explanation, b: Explanation, names: tuple[str, str]) -> dict[str, str]:
    def first(text: Explanation) -> tuple[str, str]:
        heads = text.heads
        return (
            percent(heads.first_attention.mean().item()),
            percent(heads.first_contribution.sum(dim=1).mean().item()),
        )

    (attention_a, given_a), (attention_b, given_b) = first(a), first(b)
    return {
        "verdict": f"{names[1]} less {names[0]}",
        "detail": f"The first token receives {attention_a} of the attention and gives {given_a} "
        f"of the output in {names[0]}, {attention_b} and {given_b} in {names[1]} (means over "
        "layers, heads and queries).",
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
        said.append("Single heads: the models have different numbers of them.")
    return said


def _numbers(layers: Sequence[LayerAttention]) -> str:
    return ranges(sorted(layer.index for layer in layers))
