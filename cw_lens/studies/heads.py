"""What each head gives, layer by layer: the first key's weight, entropies, cancellation, size."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from cw_lens.geometry import inter_head_contributions, intra_head_contributions
from cw_lens.layer import LayerAttention
from cw_lens.metrics import value_weighted
from cw_lens.scores import QUERY_BLOCK


@dataclass(frozen=True, eq=False)
class HeadProfile:
    """Means over the real queries of all examples, one number per layer and head.

    Attributes:
        layers: the number of each layer along the first axis.
        first_attention: weight of the first key; its mean over heads is the layer's (paper,
            table 4).
        first_value_weighted: weight of the first key, value-weighted rows normalised over head
            and key; sums over heads to the layer's.
        first_contribution: signed contribution of the first key; sums over heads to the layer's.
        first_intra_head_contribution: signed contribution of the first key within the head.
        attention_entropy, value_weighted_entropy, contribution_entropy: entropy in nats of the
            head's row, normalised over keys: alpha, alpha ||v W_O||, |c| (paper, table 5).
        gross: sum over keys of |c|.
        net: sum over keys of c, the head's signed share of the output.
        output_norm: length of the head's output, in units of the residual stream.
        sink_cosine: mean over the other keys of cos(v_first W_O, v_j W_O) (paper, figure 5a); 0
            where a gate leaves no one value for all queries, or there is no other key.
    """

    layers: tuple[int, ...]
    first_attention: Float[Tensor, "layer head"]
    first_value_weighted: Float[Tensor, "layer head"]
    first_contribution: Float[Tensor, "layer head"]
    first_intra_head_contribution: Float[Tensor, "layer head"]
    attention_entropy: Float[Tensor, "layer head"]
    value_weighted_entropy: Float[Tensor, "layer head"]
    contribution_entropy: Float[Tensor, "layer head"]
    gross: Float[Tensor, "layer head"]
    net: Float[Tensor, "layer head"]
    output_norm: Float[Tensor, "layer head"]
    sink_cosine: Float[Tensor, "layer head"]

    @classmethod
    def statistics(cls) -> tuple[str, ...]:
        """Names of the [layer, head] fields."""
        return tuple(field.name for field in fields(cls) if field.name != "layers")

    def table(self) -> pd.DataFrame:
        """One row per layer and head, one column per statistic."""
        heads = self.gross.shape[1]
        columns = {
            "layer": [layer for layer in self.layers for _ in range(heads)],
            "head": list(range(heads)) * len(self.layers),
        }
        values = {name: getattr(self, name).flatten().tolist() for name in self.statistics()}
        return pd.DataFrame(columns | values)


def layer_head_statistics(layer: LayerAttention) -> dict[str, Float[Tensor, " head"]]:
    """Every statistic of `HeadProfile` for one whole layer, in blocks of queries."""
    totals: dict[str, Tensor] = {}
    for block in layer.query_blocks(QUERY_BLOCK):
        for name, rows in _query_statistics(block).items():
            total = rows.masked_fill(~block.query_mask[:, None], 0.0).sum(dim=(0, 2))
            totals[name] = totals.get(name, 0.0) + total
    means = {name: total / layer.query_mask.sum() for name, total in totals.items()}
    return means | {"sink_cosine": _sink_cosine(layer)}


def head_profile(statistics: Sequence[dict[str, Tensor]], layers: Sequence[int]) -> HeadProfile:
    """One profile from the statistics of each layer."""
    stacked = {name: torch.stack([s[name] for s in statistics]).cpu() for name in statistics[0]}
    return HeadProfile(layers=tuple(layers), **stacked)


def _query_statistics(block: LayerAttention) -> dict[str, Float[Tensor, "batch head query"]]:
    contribution = inter_head_contributions(block)
    size = contribution.abs()
    weighted = value_weighted(block)
    whole = weighted.sum(dim=(1, 3))[:, None]
    first_weighted = _first_key(weighted, block)
    return {
        "first_attention": _first_key(block.pattern, block),
        "first_value_weighted": torch.where(whole > 0, first_weighted / whole, 0.0),
        "first_contribution": _first_key(contribution, block),
        "first_intra_head_contribution": _first_key(intra_head_contributions(block), block),
        "attention_entropy": _row_entropy(block.pattern),
        "value_weighted_entropy": _row_entropy(weighted),
        "contribution_entropy": _row_entropy(size),
        "gross": size.sum(dim=-1),
        "net": contribution.sum(dim=-1),
        "output_norm": block.head_output_norm,
    }


def _sink_cosine(layer: LayerAttention) -> Float[Tensor, " head"]:
    """Mean over texts and keys after the first of cos(v_first W_O, v_j W_O)."""
    others = layer.mask.clone()
    others[torch.arange(len(others)), layer.first] = False
    count = int(others.sum())
    if layer.gate is not None or not count:
        return layer.pattern.new_zeros(layer.pattern.shape[1])
    value, norm = layer.value, layer.projected_value_norm
    first = value.take_along_dim(layer.first[:, None, None, None], dim=2)
    inner = (first @ layer.gram * value).sum(dim=-1)
    lengths = norm * norm.take_along_dim(layer.first[:, None, None], dim=2)
    cosines = torch.where(lengths > 0, inner / lengths, 0.0)
    return cosines.masked_fill(~others[:, None], 0.0).sum(dim=(0, 2)) / count


def _first_key(
    edges: Float[Tensor, "batch head query key"], block: LayerAttention
) -> Float[Tensor, "batch head query"]:
    return edges.take_along_dim(block.first[:, None, None, None], dim=-1).squeeze(-1)


def _row_entropy(
    weights: Float[Tensor, "batch head query key"],
) -> Float[Tensor, "batch head query"]:
    """Entropy in nats of each row after it is normalised over keys; 0 for an empty row."""
    total = weights.sum(dim=-1)
    plogp = torch.special.entr(weights).sum(dim=-1)
    # H(w / W) = (sum of -w log w) / W + log W, without a normalised copy
    return torch.where(total > 0, plogp / total + total.log(), 0.0)
