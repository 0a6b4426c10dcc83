"""Norms behind the output matrix: what is linear in them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class OutputNorm:
    """What a norm after the output matrix does besides dividing each vector by a scalar.

    Attributes:
        gain: factor of each component, up to one common factor.
        centred: whether the mean over components is taken away first (LayerNorm).
        bias: what the norm adds, or None.
        function: the norm itself.
    """

    gain: Float[Tensor, " d_model"]
    centred: bool
    bias: Float[Tensor, " d_model"] | None
    function: Callable[[Tensor], Tensor]

    def applied(self, vectors: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        """Centring and gain alone: linear, without the scalar and without the bias."""
        if self.centred:
            vectors = vectors - vectors.mean(dim=-1, keepdim=True)
        return vectors * self.gain.to(vectors)


def output_norm(norm: Any, weight: Tensor) -> OutputNorm:
    """The linear part of a norm, found by running it on two vectors.

    A vector of alternating signs has mean 0 and length 1 by either rule, so that what comes out
    is the gain; a constant vector comes out as nothing where the mean is taken away.
    """
    function = getattr(norm, "original_component", norm)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    if isinstance(function, nn.LayerNorm):  # it takes no other dtype than its own
        dtype = weight.dtype
    with torch.no_grad():
        zero = torch.zeros(1, 1, weight.shape[1], dtype=dtype, device=weight.device)
        signs = torch.ones_like(zero)
        signs[..., 1::2] = -1
        constant, bias = function(torch.ones_like(zero)), function(zero)
        centred = bool((constant - bias).abs().max() < 1e-2 * (function(signs) - bias).abs().max())
        if centred:
            signs = signs - signs.mean()
        gain = ((function(signs) - bias) / signs)[0, 0]
    return OutputNorm(gain, centred, bias[0, 0] if bias.any() else None, function)
