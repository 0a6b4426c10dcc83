"""A `LayerAttention` from what a forward pass showed of a site, not yet held against anything."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from cw_lens.layer import LayerAttention, layer_attention
from cw_lens.prompts import Prompts
from cw_lens.sites import AttentionSite


def site_layer(
    site: AttentionSite, parts: Mapping[str, Tensor], prompts: Prompts, space: str
) -> LayerAttention:
    """A layer in float32 or better, in the space asked for, its gain to the stream included.

    Args:
        site: where the parts come from.
        parts: as `AttentionSite.arranged` gives them; residual, value and pattern must be there.
            Where a norm follows and "normed" is missing, the norm is run.
        prompts: what the model was given.
        space: "residual" or "attention" (SPEC 1).
    """
    pattern = parts["pattern"]
    device = pattern.device
    mask = prompts.mask.to(device)
    dtype = torch.promote_types(pattern.dtype, torch.float32)
    W_O = site.W_O(pattern.shape[1]).to(device, dtype)
    b_O = None if site.b_O is None else site.b_O.detach().to(device, dtype)
    norm = site.norm if space == "residual" else None
    layer = layer_attention(
        site.index,
        pattern,
        parts["value"],
        W_O=W_O if norm is None else norm.applied(W_O),
        b_O=b_O if norm is None or b_O is None else norm.applied(b_O),
        residual=parts["residual"].to(device),
        ids=prompts.ids.to(device),
        mask=mask,
        causal=_is_causal(pattern, mask),
        gate=parts.get("gate"),
    )
    if site.norm is None and site.multiplier == 1:
        return layer if space == layer.space else replace(layer, space=space)
    scale = (
        None if site.norm is None else norm_scale(layer, site, _normed(layer, site, parts), space)
    )
    return replace(layer, stream_gain=_stream_gain(layer, site, scale, space), space=space)


def norm_scale(
    layer: LayerAttention,
    site: AttentionSite,
    normed: Float[Tensor, "batch query d_model"],
    space: str,
) -> Float[Tensor, "batch query"]:
    """The scalar by which the norm multiplied each output: what fits best, never negative."""
    unscaled = layer.output if layer.b_O is None else layer.output + layer.b_O
    if space == "attention" and site.norm is not None:
        unscaled = site.norm.applied(unscaled)
    true = without_norm_bias(site, normed.to(unscaled))
    scale = (true * unscaled).sum(dim=-1) / unscaled.square().sum(dim=-1).clamp_min(1e-30)
    return scale.clamp_min(0.0)


def without_norm_bias(
    site: AttentionSite, normed: Float[Tensor, "batch query d_model"]
) -> Float[Tensor, "batch query d_model"]:
    """What the norm returned, less its bias."""
    bias = None if site.norm is None else site.norm.bias
    return normed if bias is None else normed - bias.to(normed)


def _normed(
    layer: LayerAttention, site: AttentionSite, parts: Mapping[str, Tensor]
) -> Float[Tensor, "batch query d_model"]:
    """What the norm returns, or would return, for the layer's output."""
    if "normed" in parts or site.norm is None:
        return parts["normed"]
    W_O = site.W_O(layer.z.shape[1]).to(layer.z)
    output = einsum(layer.z, W_O, "batch head query d, head d m -> batch query m")
    return site.norm.function(output if site.b_O is None else output + site.b_O.to(output))


def _is_causal(
    pattern: Float[Tensor, "batch head query key"], mask: Bool[Tensor, "batch query"]
) -> bool:
    """Whether no first query attends to a later key, as one of a bidirectional model does."""
    first = mask.int().argmax(dim=1)
    later = mask & (torch.arange(mask.shape[1], device=mask.device) > first[:, None])
    row = pattern.take_along_dim(first[:, None, None, None], dim=2).squeeze(2)
    # a row of NaN, as of a broken run beside sound ones in a batch, says nothing
    return not bool((row.masked_fill(~later[:, None], 0.0) > 0).any())


def _stream_gain(
    layer: LayerAttention,
    site: AttentionSite,
    scale: Float[Tensor, "batch query"] | None,
    space: str,
) -> Float[Tensor, "batch query"]:
    """||what is added to the stream|| / ||output||, biases left out."""
    gain = torch.full_like(layer.output[..., 0], site.multiplier)
    if scale is not None:
        gain = gain * scale
    if site.norm is not None and space == "attention":
        gain = gain * site.norm.applied(layer.output).norm(dim=-1) / layer.output_norm
    return gain.masked_fill(~layer.query_mask, 0.0)
