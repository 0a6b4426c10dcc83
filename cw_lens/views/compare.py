"""Two runs side by side: what changes between two prompts, or between two models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cw_lens.errors import InputError
from cw_lens.layer import LayerAttention
from cw_lens.runs import Run
from cw_lens.studies.explain import Explanation, explanations
from cw_lens.views.budget import (
    counts_within,
    layer_bytes,
    omissions_of,
    page_reserve,
    ranges,
    strongest,
)
from cw_lens.views.page import Page, document
from cw_lens.views.payload import (
    DERIVED,
    RANGE_ROOM,
    Ranges,
    certificate_rows,
    derived_edges,
    packed,
    script_json,
    triangle,
)
from cw_lens.views.show import SIZE_BUDGET
from cw_lens.views.words import isolated, percent

COMPARED = ("signed_contribution", *(name for name in DERIVED if name != "signed_contribution"))
"""The quantities whose differences a page holds, in the order of its switch."""
ADDITIVE = {
    "value_weighted",
    "value_weighted_output_normalized",
    "contribution",
    "signed_contribution",
}
"""Those that are compared as sums over heads where two models have different numbers of them; of
the others the means are."""


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
    changes = [_change(*pair, aligned) for pair in pairs]
    payload = _payload(a, b, aligned, changes, names)
    omissions = _left_out(a, b, aligned, pairs)
    around = len(document(script_json(payload), ("compare", "grid"), view=True).encode())
    selection = _selection(changes, around + sum(map(len, omissions)), size_budget)
    ranges = Ranges(COMPARED)
    payload["prompts"][0]["held_tokens"] = selection.held
    payload["prompts"][0]["layers"] = [
        _layer_payload(*pair, aligned, selection, ranges)
        for pair in pairs
        if pair[0].index in selection.heads
    ]
    payload["ranges"] = ranges.payload()
    payload["omissions"] = [*omissions, *selection.omissions]
    made = document(script_json(payload), ("compare", "grid"), view=True)
    return Page(made, selection.estimated_bytes, tuple(payload["omissions"]))


def align(first: Sequence[str], second: Sequence[str]) -> Alignment:
    """Equal tokens in common order, and runs of equal length in place of one another."""
    pairs: list[tuple[int, int]] = []
    for kind, i, j, k, m in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if kind == "equal" or (kind == "replace" and j - i == m - k):
            pairs += zip(range(i, j), range(k, m), strict=True)
    return Alignment(tuple(i for i, _ in pairs), tuple(j for _, j in pairs))


@dataclass(frozen=True, eq=False)
class _Change:
    """How much one layer's signed contributions differ, summed over the other axes.

    Attributes:
        index, causal: of the layer.
        whole: its number of heads; 1 where all heads of either model are compared as one.
        heads, tokens: by head, and by pair of aligned tokens as keys.
    """

    index: int
    causal: bool
    heads: Float[Tensor, " head"]
    tokens: Float[Tensor, " pair"]


@dataclass(frozen=True)
class _Selection:
    """What of a comparison fits a page: heads by layer, pairs of tokens, what is left out."""

    heads: dict[int, tuple[int, ...]]
    tokens: tuple[int, ...]
    held: tuple[int, ...] | None
    omissions: tuple[str, ...]
    estimated_bytes: int


def _one_text(run: Run[Any], name: str) -> Explanation:
    if len(run.prompts) != 1:
        raise InputError(
            f"run {name} holds {len(run.prompts)} prompts; compare takes runs of one. Capture "
            "each prompt by itself."
        )
    return explanations(run)[0]


def _difference(
    a: LayerAttention, b: LayerAttention, aligned: Alignment, names: Sequence[str]
) -> dict[str, Float[Tensor, "head pair pair"]]:
    """B less A on the aligned tokens, head by head where the models have as many heads.

    Where they have not, shares of the layer's output are summed over heads and the rest averaged:
    means of shares would shrink with the number of heads.
    """
    edges_a, edges_b = derived_edges(a), derived_edges(b)
    one = a.pattern.shape[1] == b.pattern.shape[1]
    i, j = torch.tensor(aligned.first), torch.tensor(aligned.second)
    found = {}
    for name in names:
        of_a, of_b = (edges[name][0].cpu() for edges in (edges_a, edges_b))
        if not one:
            join = torch.sum if name in ADDITIVE else torch.mean
            of_a, of_b = (join(part, dim=0, keepdim=True) for part in (of_a, of_b))
        found[name] = of_b[:, j][:, :, j] - of_a[:, i][:, :, i]
    return found


def _change(a: LayerAttention, b: LayerAttention, aligned: Alignment) -> _Change:
    size = _difference(a, b, aligned, ["signed_contribution"])["signed_contribution"].abs()
    return _Change(a.index, a.causal, size.sum(dim=(1, 2)), size.sum(dim=(0, 1)))


def _selection(changes: Sequence[_Change], fixed_bytes: int, size_budget: float) -> _Selection:
    """The layers, then heads, then tokens that change most, as far as a page can hold them."""
    layers = [change.index for change in changes]
    n_heads, n_tokens = len(changes[0].heads), len(changes[0].tokens)
    causal = changes[0].causal

    def size(layer_count: int, head_count: int, token_count: int) -> int:
        of_layer = layer_bytes(head_count, token_count, causal, matrices=len(COMPARED))
        return fixed_bytes + page_reserve(n_tokens, token_count) + layer_count * of_layer

    counts = counts_within(size, (len(layers), n_heads, n_tokens), size_budget)
    by_layer = {change.index: change.heads for change in changes}
    strength = [by_layer[index].sum().item() for index in layers]
    kept = {
        index: strongest(range(n_heads), by_layer[index].tolist(), counts[1])
        for index in strongest(layers, strength, counts[0])
    }
    weights = [math.inf, *_token_changes(changes)[1:].tolist()]
    tokens = strongest(range(n_tokens), weights, counts[2])
    by = "change in contribution"
    left_out = omissions_of(layers, kept, n_heads, tokens, n_tokens, strength=by, weight=by)
    held = None if len(tokens) == n_tokens else tokens
    return _Selection(kept, tokens, held, left_out, size(*counts))


def _token_changes(changes: Sequence[_Change]) -> Float[Tensor, " pair"]:
    return torch.stack([change.tokens for change in changes]).sum(dim=0)


def _layer_payload(
    a: LayerAttention,
    b: LayerAttention,
    aligned: Alignment,
    selection: _Selection,
    ranges: Ranges,
) -> dict[str, Any]:
    one = a.pattern.shape[1] == b.pattern.shape[1]
    heads = selection.heads[a.index]
    keep_heads, keep_tokens = torch.tensor(heads), torch.tensor(selection.tokens)
    own = {}
    for name, edges in _difference(a, b, aligned, COMPARED).items():
        part = edges[keep_heads][:, keep_tokens][:, :, keep_tokens]
        part = triangle(part) if a.causal else part
        ranges.add(name, part)
        own[name] = packed(part)
    return {
        "index": a.index,
        "causal": a.causal,
        "heads": list(heads) if one else ["all"],
        "n_heads": a.pattern.shape[1] if one else 1,
        "own": own,
    }


def _payload(
    a: Explanation,
    b: Explanation,
    aligned: Alignment,
    changes: Sequence[_Change],
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
        "change": packed(_token_changes(changes)),
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
