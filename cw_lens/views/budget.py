"""How large a page will be, and what it keeps when that is too much, decided before rendering."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cw_lens.errors import InputError
from cw_lens.studies.explain import Explanation
from cw_lens.views.payload import MATRICES

FEWEST_HEADS = 4
"""Heads are dropped down to this number before tokens are."""
FEWEST_TOKENS = 8
"""A page that cannot hold the edges among this many tokens is refused."""

_LAYER_OVERHEAD = 200  # names and brackets of one layer's JSON
_MATRIX_OVERHEAD = 100  # name and unit of one matrix
_OMISSION_BYTES = 1000  # the sentences that say what was left out


@dataclass(frozen=True)
class Selection:
    """The part of the chosen layers whose edges a page holds.

    Attributes:
        heads: layer number -> heads kept, for each layer kept, in the explanation's order.
        tokens: positions kept, in text order.
        omissions: one sentence for each kind of thing left out; empty if nothing was.
        estimated_bytes: size of the page.
    """

    heads: dict[int, tuple[int, ...]]
    tokens: tuple[int, ...]
    omissions: tuple[str, ...]
    estimated_bytes: int


def select(
    explanation: Explanation,
    *,
    fixed_bytes: int,
    size_budget: float,
    texts: int = 1,
    matrices: int = len(MATRICES),
    first_layer: int | None = None,
    first_query: int | None = None,
) -> Selection:
    """The largest selection that fits: the strongest layers, then heads, then tokens.

    Layers and heads are ranked by gross contribution, the mean over queries of sum |c|; tokens by
    the contribution score averaged over layers and heads, the first token always kept.

    Args:
        fixed_bytes: size of the page without any layer's edges.
        size_budget: what the page may take, in bytes.
        texts: how many texts share a page of that many times these sizes.
        matrices: how many edge matrices a layer has on the page.
        first_layer: the layer that is shown first, kept before all others.
        first_query: the token whose row is shown first, kept before all but the first.

    Raises:
        InputError: a budget too small for one layer, `FEWEST_HEADS` heads, `FEWEST_TOKENS` tokens.
    """
    layers = [layer.index for layer in explanation.layers]
    n_tokens = explanation.prompts.ids.shape[1]
    if not layers:
        _refuse_below(fixed_bytes, size_budget, texts)
        return Selection({}, tuple(range(n_tokens)), (), fixed_bytes)
    causal = explanation.layers[0].causal
    gated = explanation.layers[0].gate is not None
    n_heads = explanation.layers[0].pattern.shape[1]

    def size(layer_count: int, head_count: int, token_count: int) -> int:
        size_of_layer = layer_bytes(head_count, token_count, causal, gated, matrices=matrices)
        return fixed_bytes + page_reserve(n_tokens, token_count) + layer_count * size_of_layer

    layer_count, head_count, token_count = counts_within(
        size, (len(layers), n_heads, n_tokens), size_budget, texts
    )
    gross = dict(zip(explanation.heads.layers, explanation.heads.gross, strict=True))
    strength = [math.inf if i == first_layer else gross[i].sum().item() for i in layers]
    kept_layers = strongest(layers, strength, layer_count)
    kept_heads = {i: strongest(range(n_heads), gross[i].tolist(), head_count) for i in kept_layers}
    weights = explanation.scores["contribution"][0].mean(dim=(0, 1)).tolist()
    for token in (0, first_query):
        if token is not None:
            weights[token] = math.inf
    kept_tokens = strongest(range(n_tokens), weights, token_count)
    omissions = omissions_of(layers, kept_heads, n_heads, kept_tokens, n_tokens)
    return Selection(kept_heads, kept_tokens, omissions, size(layer_count, head_count, token_count))


def counts_within(
    size: Callable[[int, int, int], int],
    whole: tuple[int, int, int],
    size_budget: float,
    texts: int = 1,
) -> tuple[int, int, int]:
    """How many layers, heads and tokens a page can hold: layers are given up first, tokens last.

    Args:
        size: of a page that holds so many layers, heads and tokens, in bytes.
        whole: how many there are of each.
        texts: how many texts share a page of that many times these sizes.

    Raises:
        InputError: no room for one layer, `FEWEST_HEADS` heads and `FEWEST_TOKENS` tokens.
    """
    layers, heads, tokens = whole
    fewest_heads, fewest_tokens = min(FEWEST_HEADS, heads), min(FEWEST_TOKENS, tokens)
    _refuse_below(size(1, fewest_heads, fewest_tokens), size_budget, texts)
    while layers > 1 and size(layers, heads, tokens) > size_budget:
        layers -= 1
    while heads > fewest_heads and size(layers, heads, tokens) > size_budget:
        heads -= 1
    while tokens > fewest_tokens and size(layers, heads, tokens) > size_budget:
        tokens -= 1
    return layers, heads, tokens


def page_reserve(n_tokens: int, kept: int) -> int:
    """Bytes for what is said of the things left out; positions kept and left out are listed."""
    return _OMISSION_BYTES + (8 * n_tokens if kept < n_tokens else 0)


def fits_layer_scores(explanation: Explanation, size_budget: float) -> bool:
    """Whether token scores of every layer take at most a quarter of the budget."""
    numbers = sum(explanation.scores[name][0, :, 0].numel() for name in explanation.scores.metrics)
    return _base64_bytes(2 * numbers) <= size_budget / 4


def layer_bytes(
    heads: int, tokens: int, causal: bool, gated: bool = False, *, matrices: int = len(MATRICES)
) -> int:
    """Size of one layer's edges on the page; a gated layer has one matrix more."""
    edges = tokens * (tokens + 1) // 2 if causal else tokens * tokens
    held = (matrices + gated) * (_base64_bytes(2 * heads * edges) + _MATRIX_OVERHEAD)
    lengths = _base64_bytes(4 * heads * tokens) + _base64_bytes(4 * tokens)
    return held + lengths + 5 * heads + _LAYER_OVERHEAD


def ranges(numbers: Sequence[int]) -> str:
    """Whole numbers in ascending order, runs joined: "0-3, 7, 9-12"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _refuse_below(needed: int, size_budget: float, texts: int) -> None:
    if not size_budget >= needed:
        raise InputError(
            f"a page of at most {texts * size_budget / 1e6:.1f} MB cannot be made: its scripts, "
            f"the token scores and the smallest head view take "
            f"{math.ceil(texts * needed / 1e5) / 10} MB. Raise size_budget to that, or show "
            "fewer or shorter texts."
        )


def _base64_bytes(count: int) -> int:
    return 4 * ((count + 2) // 3)


def strongest(items: Sequence[int], strength: Sequence[float], count: int) -> tuple[int, ...]:
    """The `count` items of greatest strength, in their own order; ties to the earlier."""
    ranked = sorted(range(len(items)), key=lambda i: (-strength[i], i))[:count]
    return tuple(items[i] for i in sorted(ranked))


def omissions_of(
    layers: Sequence[int],
    kept_heads: dict[int, tuple[int, ...]],
    n_heads: int,
    kept_tokens: tuple[int, ...],
    n_tokens: int,
    *,
    strength: str = "gross contribution",
    weight: str = "contribution score",
) -> tuple[str, ...]:
    """A sentence for each kind of thing left out.

    Args:
        strength, weight: by what layers and heads were ranked, and by what tokens.
    """
    said = []
    gone_layers = sorted(set(layers) - set(kept_heads))
    if gone_layers:
        said.append(
            f"Head views of layers {ranges(gone_layers)}. Kept: {ranges(sorted(kept_heads))}, "
            f"with the largest {strength}."
        )
    for layer, heads in kept_heads.items():
        gone = sorted(set(range(n_heads)) - set(heads))
        if gone:
            said.append(
                f"Head views of layer {layer}, heads {ranges(gone)}. Kept: the {len(heads)} heads "
                f"with the largest {strength}; means over heads are over these."
            )
    gone_tokens = sorted(set(range(n_tokens)) - set(kept_tokens))
    if gone_tokens:
        said.append(
            f"Head views of {len(gone_tokens)} of the {n_tokens} tokens. Kept: the first token and "
            f"the {len(kept_tokens) - 1} with the largest {weight}, in text order. "
            f"Left out: positions {ranges(gone_tokens)}."
        )
    return tuple(said)
