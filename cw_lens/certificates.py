"""From what a forward pass showed of a layer to a `LayerAttention` that is proved to add up."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cw_lens.errors import CWLensError
from cw_lens.geometry import low_outputs
from cw_lens.layer import LayerAttention, layer_attention
from cw_lens.prompts import Prompts
from cw_lens.sites import AttentionSite

TOLERANCE = {
    torch.float64: 1e-6,  # Hugging Face's norms compute in float32
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""Largest error of the two identities, by the dtype that the model computes in."""

SPACES = ("residual", "attention")
"""Where contributions are measured if a norm follows the output matrix (SPEC 1)."""


class IdentityError(CWLensError, RuntimeError):
    """The parts read of a layer do not add up to what the layer computed."""


@dataclass(frozen=True)
class Certificate:
    """How well a layer's parts add up to what the model computed.

    An error is the largest length of a difference over real queries, each relative to the true
    vector's length or, where that is larger, to the layer's median length.

    Attributes:
        layer: the layer's number.
        value_error: of sum over keys of pattern * value, against the model's z.
        output_error: of z W_O + b_O, z rebuilt, against the model's attention output; in residual
            space, where a norm follows, against what the norm returns, up to its scalar. None
            where there was no output to hold it against, in a cache.
        tolerance: what both had to stay within.
        low_outputs: number of real queries whose output is below the layer's floor.
        dtype: the dtype that the model computed in.
        space: "residual" or "attention"; the same where no norm follows the output matrix.
    """

    layer: int
    value_error: float
    output_error: float | None
    tolerance: float
    low_outputs: int
    dtype: str
    space: str

    @property
    def error(self) -> float:
        """The larger of the two errors."""
        return max(self.value_error, self.output_error or 0.0)


def certified_layer(
    site: AttentionSite, parts: Mapping[str, Tensor], prompts: Prompts, space: str
) -> tuple[LayerAttention, Certificate]:
    """A layer from the parts that a forward pass showed, and the proof that they add up.

    Args:
        site: where the parts come from.
        parts: as `AttentionSite.arranged` gives them; "output" may be missing.
        prompts: what the model was given.
        space: out of `SPACES`.

    Raises:
        IdentityError: naming the layer, the size of the miss and its likely causes.
    """
    pattern = parts["pattern"]
    device = pattern.device
    mask = prompts.mask.to(device)
    tolerance = TOLERANCE[pattern.dtype]
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
    if not mask.all():
        _require_padding_unseen(site.index, pattern, mask, tolerance)
    value_error = _relative_miss(layer.z, parts["z"].to(layer.z), mask[:, None])
    if not value_error <= tolerance:
        raise IdentityError(
            f"layer {site.index}: sum of alpha v misses hook_z by {value_error:.2g} (relative; "
            f"tolerance {tolerance:.0e}). Likely causes: NaN or infinite weights, a gate, clamp or "
            "norm on the values that hook_v does not show, grouped values in another order, "
            "or a hook of yours that writes."
        )
    rebuilt = layer.output if layer.b_O is None else layer.output + layer.b_O
    scale = None if site.norm is None else _norm_scale(site, parts["normed"], rebuilt, space)
    if norm is not None and scale is not None:
        true = _without_bias(site, parts["normed"].to(rebuilt))
        output_error = _relative_miss(rebuilt * scale[..., None], true, mask)
        if (scale <= 0)[mask & (rebuilt.norm(dim=-1) > 0)].any():
            output_error = float("inf")  # no norm turns an output round, or into nothing
    elif "output" in parts:
        output_error = _relative_miss(rebuilt, parts["output"].to(rebuilt), mask)
    else:
        output_error = None
    if output_error is not None and not output_error <= tolerance:
        raise IdentityError(
            f"layer {site.index}: z W_O + b_O misses the attention's output by {output_error:.2g} "
            f"(relative; tolerance {tolerance:.0e}). Likely causes: NaN or infinite weights, a "
            "norm or gate between z and the output matrix, an output that is scaled or already "
            "holds the residual, processed weights, or a hook of yours that writes."
        )
    certificate = Certificate(
        layer=site.index,
        value_error=value_error,
        output_error=output_error,
        tolerance=tolerance,
        low_outputs=int(low_outputs(layer).sum()),
        dtype=str(pattern.dtype).removeprefix("torch."),
        space=space,
    )
    if scale is not None or site.multiplier != 1 or space != layer.space:
        layer = replace(layer, stream_gain=_stream_gain(layer, site, scale, space), space=space)
    return layer, certificate


def _is_causal(
    pattern: Float[Tensor, "batch head query key"], mask: Bool[Tensor, "batch query"]
) -> bool:
    """Whether no first query attends to a later key, as one of a bidirectional model does."""
    first = mask.int().argmax(dim=1)
    later = mask & (torch.arange(mask.shape[1], device=mask.device) > first[:, None])
    row = pattern.take_along_dim(first[:, None, None, None], dim=2).squeeze(2)
    return not bool(row.masked_fill(~later[:, None], 0.0).any())


def _require_padding_unseen(
    index: int,
    pattern: Float[Tensor, "batch head query key"],
    mask: Bool[Tensor, "batch query"],
    tolerance: float,
) -> None:
    leaked = pattern.float().masked_fill(mask[:, None, None, :], 0.0).sum(dim=-1)
    leaked = leaked.masked_fill(~mask[:, None, :], 0.0).max().item()
    if math.isnan(leaked):
        raise IdentityError(
            f"layer {index}: a real query's attention is NaN in a padded batch, as its logits will "
            "be. Pad on the other side, use another dtype, or run the texts one by one."
        )
    if not leaked <= tolerance:
        raise IdentityError(
            f"layer {index}: a real query gives {leaked:.2g} of its attention to padding. "
            "The model ignores the padding mask; run its texts one by one."
        )


def _without_bias(
    site: AttentionSite, normed: Float[Tensor, "batch query d_model"]
) -> Float[Tensor, "batch query d_model"]:
    bias = None if site.norm is None else site.norm.bias
    return normed if bias is None else normed - bias.to(normed)


def _norm_scale(
    site: AttentionSite, normed: Tensor, rebuilt: Float[Tensor, "batch query d_model"], space: str
) -> Float[Tensor, "batch query"]:
    """The scalar by which the norm multiplied each output: what fits best, never negative."""
    unscaled = rebuilt
    if space == "attention" and site.norm is not None:
        unscaled = site.norm.applied(rebuilt)
    true = _without_bias(site, normed.to(rebuilt))
    scale = (true * unscaled).sum(dim=-1) / unscaled.square().sum(dim=-1).clamp_min(1e-30)
    return scale.clamp_min(0.0)


def _stream_gain(
    layer: LayerAttention,
    site: AttentionSite,
    scale: Float[Tensor, "batch query"] | None,
    space: str,
) -> Float[Tensor, "batch query"] | None:
    """||what is added to the stream|| / ||output||, biases left out; None where it is 1."""
    if scale is None and site.multiplier == 1:
        return None
    gain = torch.full_like(layer.output[..., 0], site.multiplier)
    if scale is not None:
        gain = gain * scale
    if site.norm is not None and space == "attention":
        gain = gain * site.norm.applied(layer.output).norm(dim=-1) / layer.output_norm
    return gain.masked_fill(~layer.query_mask, 0.0)


def _relative_miss(
    rebuilt: Float[Tensor, "*axes d"], true: Float[Tensor, "*axes d"], real: Bool[Tensor, "*some"]
) -> float:
    """Largest length of rebuilt - true over real vectors, as `Certificate` measures it."""
    if rebuilt.shape != true.shape:
        return float("inf")
    length = true.norm(dim=-1)
    real = real.expand(length.shape)
    median = length[real].median()
    miss = (rebuilt - true).norm(dim=-1) / length.maximum(median).clamp_min(1e-30)
    return miss.masked_fill(~real, 0.0).max().item()
