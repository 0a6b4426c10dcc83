"""From what a forward pass showed of a layer to a `LayerAttention` that is proved to add up."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cw_lens.errors import CWLensError
from cw_lens.geometry import low_outputs
from cw_lens.layer import LayerAttention
from cw_lens.prompts import Prompts
from cw_lens.site_layers import norm_scale, site_layer, without_norm_bias
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
    mask = prompts.mask.to(pattern.device)
    tolerance = TOLERANCE[pattern.dtype]
    norm = site.norm if space == "residual" else None
    layer = site_layer(site, parts, prompts, space)
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
    if norm is not None:
        scale = norm_scale(layer, site, parts["normed"], space)
        true = without_norm_bias(site, parts["normed"].to(rebuilt))
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
    return layer, certificate


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
