"""A uniform sample of a corpus' edges, with what their contributions are made of.

Each edge has a priority, uniform in [0, 1); those below a rate are kept. So samples of parts of a
corpus join into one of the whole, those of different rates can be thinned to the same, and the
edges of lowest priority are a uniform sample of any size: a reservoir that merges exactly.
"""

from collections.abc import Sequence

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from cw_lens.errors import InputError
from cw_lens.geometry import low_outputs
from cw_lens.layer import LayerAttention
from cw_lens.studies.alignment import require_one_text

FACTORS = ("attention", "relative_norm", "cosine")
"""What an inter-head contribution is the product of (paper, section 4.1)."""
CAPACITY = 5_000_000
"""The paper's number of points (table 1)."""

_POINTS = 1 << 16  # gathered at a time, a vector of d_head each


def sampling_rates(
    lengths: Sequence[int], heads: int, layers: int, capacity: int = CAPACITY
) -> dict[str, float]:
    """`rate` and `first_rate` at which a corpus of these lengths gives `layer_components` enough.

    Each gives `capacity` points or, for chance, slightly more: by five standard deviations.

    Raises:
        InputError: no lengths, or a length, number or capacity below 1.
    """
    if not lengths or min(*lengths, heads, layers, capacity) < 1:
        raise InputError(
            f"{len(lengths)} lengths, {heads} heads, {layers} layers and a capacity of {capacity}: "
            "give at least one length, and nothing below 1."
        )
    enough = capacity + 5 * capacity**0.5
    others = heads * layers * sum(length * (length - 1) // 2 for length in lengths)
    firsts = heads * layers * sum(lengths)
    return {"rate": min(1.0, enough / max(others, 1)), "first_rate": min(1.0, enough / firsts)}


def layer_components(
    layer: LayerAttention, *, rate: float = 1.0, first_rate: float = 1.0, seed: int = 0
) -> dict[str, Tensor]:
    """A uniform sample of the edges of one layer of one text, with the factors of each.

    Arrays [point]: `head`, `query`, `key`, `priority`, uniform below the rate of the draw, and
    `attention`, `relative_norm`, `cosine` and signed `contribution`, as `decompose` and
    `inter_head_contributions` give them. Numbers: `first_rate` and `other_rate`, `first_edges` and
    `other_edges` drawn from, and `low_queries`, left out because their output is low. Fixed by the
    seed, the text's own tokens and the layer: neither other texts nor their order change it.

    Args:
        layer: all of it.
        rate: share of the edges to keys other than the first.
        first_rate: share of the edges to the first key.
        seed: of the draws.

    Raises:
        InputError: a rate outside (0, 1], and as `require_one_text`.
    """
    require_one_text(layer)
    if not (0 < rate <= 1 and 0 < first_rate <= 1):
        raise InputError(f"rates of {rate} and {first_rate}; they lie above 0 and up to 1.")
    low = low_outputs(layer)[0]
    queries = (~low).nonzero()[:, 0].cpu().numpy()
    others = queries if layer.causal else np.full_like(queries, layer.mask.shape[1] - 1)
    heads = layer.pattern.shape[1]
    numbers: dict[str, float] = {"low_queries": int(low.sum())}
    draws = []
    kinds = ("first", first_rate, np.ones_like(queries)), ("other", rate, others)
    for start, (kind, share, seen) in enumerate(kinds):  # the key that each begins with
        digest = int(layer.prompt_digest[0]) % (1 << 64)
        generator = np.random.default_rng([seed, digest, layer.index, start])
        ends = seen.cumsum()  # of each query's edges, in one head
        in_head = int(seen.sum())
        edges = heads * in_head
        n = generator.binomial(edges, share)
        drawn = np.sort(generator.choice(edges, n, replace=False, shuffle=False))
        head, place = np.divmod(drawn, max(in_head, 1))
        row = np.searchsorted(ends, place, side="right")
        key = start + place - (ends - seen)[row]
        draws.append((head, queries[row], key, share * generator.random(n)))
        numbers |= {f"{kind}_edges": edges, f"{kind}_rate": share}
    columns = [torch.from_numpy(np.concatenate(column)) for column in zip(*draws, strict=True)]
    head, query, key, priority = (column.to(layer.pattern.device) for column in columns)
    places = {"head": head, "query": query, "key": key, "priority": priority}
    found = {name: column.to(layer.pattern) for name, column in places.items()}
    found |= _factors(layer, head, query, key)
    return found | {name: torch.tensor(number).double() for name, number in numbers.items()}


def _factors(
    layer: LayerAttention,
    head: Int[Tensor, " point"],
    query: Int[Tensor, " point"],
    key: Int[Tensor, " point"],
) -> dict[str, Float[Tensor, " point"]]:
    """alpha, the two other factors and c of these edges, a vector of d_head for each at a time."""
    norm = layer.output_norm[0]
    along = einsum(layer.output[0] / norm[:, None], layer.W_O, "query m, head d m -> head query d")
    inner, value_norm = norm.new_empty(2, len(head))
    by_head = head.argsort(stable=True).split(head.bincount(minlength=len(along)).tolist())
    for number, of_head in enumerate(by_head):
        for part in of_head.split(_POINTS):
            value = layer.value[0, number].index_select(0, key[part])
            if layer.gate is not None:
                value = value * layer.gate[0, number].index_select(0, query[part])
            inner[part] = (value * along[number].index_select(0, query[part])).sum(dim=-1)
            squared = ((value @ layer.gram[number]) * value).sum(dim=-1)
            value_norm[part] = squared.clamp_min(0.0).sqrt()
    alpha = layer.pattern[0, head, query, key]
    return {
        "attention": alpha,
        "relative_norm": value_norm / norm[query],
        "cosine": torch.where(value_norm > 0, inner / value_norm, 0.0),
        "contribution": alpha * inner / norm[query],
    }
