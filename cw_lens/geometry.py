"""Contribution weights and their geometry, computed in d_head (SPEC 1 and 2; paper section 4).

Every function reads one `LayerAttention`, or a block of its queries, and is row-wise in the query.
Shares are of the layer's output without `b_O`. Where an output is shorter than its floor, lengths
are replaced by the floor: nothing is ever inf or NaN, and `low_outputs` marks those rows. Rows and
columns of padding are 0.
"""

from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from cw_lens.errors import InputError
from cw_lens.layer import LayerAttention


@dataclass(frozen=True, eq=False)
class Decomposition:
    """The three factors of an inter-head contribution; their product is the contribution.

    Attributes:
        attention: alpha.
        relative_norm: ||projected value|| / ||layer output||.
        cosine: between the projected value and the layer output, 0 where either vanishes.
    """

    attention: Float[Tensor, "batch head query key"]
    relative_norm: Float[Tensor, "batch head query key"]
    cosine: Float[Tensor, "batch head query key"]


@dataclass(frozen=True, eq=False)
class Interference:
    """How much of what a head's keys write cancels, as shares of the layer's output.

    Attributes:
        gross: sum over keys of |c|.
        net: sum over keys of c; gross - |net| is what cancels.
    """

    gross: Float[Tensor, "batch head query"]
    net: Float[Tensor, "batch head query"]


def inter_head_contributions(
    layer: LayerAttention, *, include_bias: bool = False
) -> Float[Tensor, "batch head query key"]:
    """Share of the layer's output that each (head, key) gives: <o, alpha v W_O> / ||o||^2.

    Signed; sums to 1 over head and key. With `include_bias` the output is o + b_O, and the shares
    sum to 1 together with `bias_share`. Paper section 4.2, c-hat.
    """
    if include_bias and layer.b_O is not None:
        output = layer.output + layer.b_O
        floor = layer.output_floor.clamp_min(torch.finfo(torch.float32).tiny ** 0.5)[:, None]
        norm = output.norm(dim=-1).maximum(floor)
    else:
        output, norm = layer.output, layer.output_norm
    # divided twice by the length: its square may underflow
    direction = output / norm[..., None] / norm[..., None]
    return target_contributions(layer, direction)


def bias_share(layer: LayerAttention) -> Float[Tensor, "batch query"]:
    """Share of o + b_O that the output bias gives: <o + b_O, b_O> / ||o + b_O||^2, signed.

    0 for a model without output bias, and at padding.
    """
    if layer.b_O is None:
        return torch.zeros_like(layer.output_norm)
    output = layer.output + layer.b_O
    floor = layer.output_floor.clamp_min(torch.finfo(torch.float32).tiny ** 0.5)[:, None]
    norm = output.norm(dim=-1).maximum(floor)
    return (output @ layer.b_O / norm / norm).masked_fill(~layer.query_mask, 0.0)


def intra_head_contributions(layer: LayerAttention) -> Float[Tensor, "batch head query key"]:
    """Share of its own head's output that each key gives: <o^h, alpha v W_O> / ||o^h||^2.

    Signed; sums to 1 over key, in each head. Paper section 4.2, c-check.
    """
    norm = layer.head_output_norm[..., None]
    pulled_back = (layer.z @ layer.gram) / norm / norm
    return layer.pattern * layer.aligned(pulled_back)


def target_contributions(
    layer: LayerAttention, direction: Float[Tensor, "*batch_query d_model"]
) -> Float[Tensor, "batch head query key"]:
    """What each (head, key) writes along a direction of the residual stream: <d, alpha v W_O>.

    Signed, in units of `direction`, which is not normalised; sums over head and key to <d, o>.

    Args:
        direction: of shape [d_model], [query, d_model] or [batch, query, d_model].

    Raises:
        InputError: if its last axis is not d_model.
    """
    if direction.shape[-1] != layer.W_O.shape[-1]:
        raise InputError(
            f"layer {layer.index}: the direction has {direction.shape[-1]} components, the "
            f"residual stream {layer.W_O.shape[-1]}. Pass a vector of d_model."
        )
    direction = direction.to(layer.output).expand_as(layer.output)
    pulled_back = einsum(direction, layer.W_O, "batch query m, head d m -> batch head query d")
    return layer.pattern * layer.aligned(pulled_back)


def projections(layer: LayerAttention) -> Float[Tensor, "batch head query key"]:
    """Contributions before they are divided: <o, alpha v W_O>, which sum to ||o||^2.

    What a contribution is made of where the output is too short to take shares of.
    """
    return target_contributions(layer, layer.output)


def low_outputs(layer: LayerAttention) -> Bool[Tensor, "batch query"]:
    """True at real queries whose output is shorter than the layer's floor.

    The floor is `cw_lens.layer.LOW_OUTPUT` times the median length over the example's queries.
    """
    norm = layer.output.norm(dim=-1)
    return (~(norm >= layer.output_floor[:, None]) | (norm == 0)) & layer.query_mask


def projected_value_norms(layer: LayerAttention) -> Float[Tensor, "batch head key"]:
    """Length of each projected value, ||v W_O||, in units of the residual stream.

    A gate that a query puts on what it reads (Qwen3-Next) is not in it; it is in every metric.
    """
    return layer.projected_value_norm


def decompose(layer: LayerAttention) -> Decomposition:
    """The three factors of each inter-head contribution (paper section 4.1)."""
    norm = layer.output_norm[:, None, :, None]
    value_norm = layer.edge_value_norm
    along = einsum(
        layer.output / layer.output_norm[..., None],
        layer.W_O,
        "batch query m, head d m -> batch head query d",
    )
    inner = layer.aligned(along)
    cosine = torch.where(value_norm > 0, inner / value_norm, 0.0)
    return Decomposition(
        attention=layer.pattern,
        relative_norm=(value_norm / norm).masked_fill(~layer.query_mask[:, None, :, None], 0.0),
        cosine=cosine,
    )


def interference(layer: LayerAttention) -> Interference:
    """Gross and net contribution of each head at each query."""
    contribution = inter_head_contributions(layer)
    return Interference(gross=contribution.abs().sum(-1), net=contribution.sum(-1))


def pairwise_interference(
    layer: LayerAttention, head: int, query: int
) -> Float[Tensor, "batch key other"]:
    """alpha_j alpha_k <v_j W_O, v_k W_O> of one head at one query position of the prompt.

    In squared units of the residual stream; sums to ||o^h||^2 over both keys. Negative entries
    are pairs that cancel.

    Raises:
        InputError: a head or query that the layer does not hold.
    """
    heads, total = layer.pattern.shape[1:3]
    row = query - layer.query_start
    if not 0 <= head < heads or not 0 <= row < total:
        raise InputError(
            f"layer {layer.index} has heads 0 to {heads - 1} and holds queries "
            f"{layer.query_start} to {layer.query_start + total - 1}; asked for head {head}, "
            f"query {query}."
        )
    written = layer.pattern[:, head, row, :, None] * layer.value[:, head]
    if layer.gate is not None:
        written = written * layer.gate[:, head, row, None]
    return written @ layer.gram[head] @ written.mT
