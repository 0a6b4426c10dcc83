"""How the edges of two runs differ on aligned tokens, and what of that a page can hold."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cw_lens.layer import LayerAttention
from cw_lens.views.budget import counts_within, layer_bytes, omissions_of, page_reserve, strongest
from cw_lens.views.payload import DERIVED, Ranges, derived_edges, packed, triangle

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


def align(first: Sequence[str], second: Sequence[str]) -> Alignment:
    """Equal tokens in common order, and runs of equal length in place of one another."""
    pairs: list[tuple[int, int]] = []
    for kind, i, j, k, m in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if kind == "equal" or (kind == "replace" and j - i == m - k):
            pairs += zip(range(i, j), range(k, m), strict=True)
    return Alignment(tuple(i for i, _ in pairs), tuple(j for _, j in pairs))


@dataclass(frozen=True, eq=False)
class Change:
    """How much one layer's signed contributions differ, summed over the other axes.

    Attributes:
        index, causal: of the layer.
        heads, tokens: by head, and by pair of aligned tokens as keys.
    """

    index: int
    causal: bool
    heads: Float[Tensor, " head"]
    tokens: Float[Tensor, " pair"]


@dataclass(frozen=True)
class ChangeSelection:
    """What of a comparison fits a page: heads by layer, pairs of tokens, what is left out."""

    heads: dict[int, tuple[int, ...]]
    tokens: tuple[int, ...]
    held: tuple[int, ...] | None
    omissions: tuple[str, ...]
    estimated_bytes: int


def difference(
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


def layer_change(a: LayerAttention, b: LayerAttention, aligned: Alignment) -> Change:
    """How much a layer's signed contributions differ."""
    size = difference(a, b, aligned, ["signed_contribution"])["signed_contribution"].abs()
    return Change(a.index, a.causal, size.sum(dim=(1, 2)), size.sum(dim=(0, 1)))


def select_changes(
    changes: Sequence[Change], fixed_bytes: int, size_budget: float
) -> ChangeSelection:
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
    weights = [math.inf, *token_changes(changes)[1:].tolist()]
    tokens = strongest(range(n_tokens), weights, counts[2])
    by = "change in contribution"
    left_out = omissions_of(layers, kept, n_heads, tokens, n_tokens, strength=by, weight=by)
    held = None if len(tokens) == n_tokens else tokens
    return ChangeSelection(kept, tokens, held, left_out, size(*counts))


def token_changes(changes: Sequence[Change]) -> Float[Tensor, " pair"]:
    """How much each pair of tokens differs as keys, over all layers."""
    return torch.stack([change.tokens for change in changes]).sum(dim=0)


def difference_payload(
    a: LayerAttention,
    b: LayerAttention,
    aligned: Alignment,
    selection: ChangeSelection,
    ranges: Ranges,
) -> dict[str, Any]:
    """The differences of one layer that a page holds, as `payload.layer_payload` packs edges."""
    one = a.pattern.shape[1] == b.pattern.shape[1]
    heads = selection.heads[a.index]
    keep_heads, keep_tokens = torch.tensor(heads), torch.tensor(selection.tokens)
    own = {}
    for name, edges in difference(a, b, aligned, COMPARED).items():
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
