"""Attention sinks: which keys act as one, by several detectors (SPEC 5).

A detector is a function LayerAttention -> [batch, head, key]; it reads the whole layer, all
queries. "First" is the first real position of each example, BOS or not.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cw_lens.errors import CWLensWarning, require_known
from cw_lens.layer import LayerAttention
from cw_lens.metrics import METRICS
from cw_lens.prompts import Prompts
from cw_lens.runs import capture
from cw_lens.scores import layer_scores

SINK_COSINE = 0.95
"""A key is a sink if its vector's cosine to the first key's is above this (paper, appendix)."""
SINK_ATTENTION = 0.3
"""A key is a sink if it receives more than this share of attention."""
CROWDED_SINKS = 0.25
"""Above this share of tokens marked in one layer, a detector is said to mark too much."""

Heads = Bool[Tensor, "batch head key"]
Detector = Callable[[LayerAttention], Tensor]


class CrowdedSinksWarning(CWLensWarning):
    """A sink detector marks so many tokens that the mark says little."""


def cosine(layer: LayerAttention) -> Heads:
    """cos(x, x_first) > 0.95, x the layer's input: the paper's rule, the same for all heads.

    It marks most tokens of a model whose residual stream is anisotropic: see `centred_cosine`.
    """
    return _all_heads(_cosine_to_first(layer.residual, layer) > SINK_COSINE, layer)


def centred_cosine(layer: LayerAttention) -> Heads:
    """As `cosine`, after the component-wise median over the other real positions is subtracted."""
    others = layer.mask & ~_is_first(layer)
    held = layer.residual.masked_fill(~others[..., None], torch.nan)
    median = held.nanmedian(dim=1, keepdim=True).values.nan_to_num(0.0)
    return _all_heads(_cosine_to_first(layer.residual - median, layer) > SINK_COSINE, layer)


def value_cosine(layer: LayerAttention) -> Heads:
    """cos > 0.95 between the projected values of a key and of the first, head by head."""
    first = layer.first[:, None, None, None].expand(-1, layer.value.shape[1], 1, 1)
    value = layer.value
    first_value = value.gather(2, first.expand(-1, -1, 1, value.shape[-1]))
    inner = ((value @ layer.gram) * first_value).sum(dim=-1)
    norm = layer.projected_value_norm
    size = norm * norm.gather(2, first[..., 0])
    return _marked((inner > SINK_COSINE * size) & (size > 0), layer)


def received_attention(layer: LayerAttention) -> Heads:
    """Token score of attention above 0.3, head by head: at least that from an average query."""
    score = layer_scores(layer, {"attention": METRICS["attention"]})["attention"]
    return _marked(score > SINK_ATTENTION, layer)


def first(layer: LayerAttention) -> Heads:
    """The first real position alone."""
    return _all_heads(_is_first(layer), layer)


SINK_DETECTORS: dict[str, Detector] = {
    "cosine": cosine,
    "centred_cosine": centred_cosine,
    "value_cosine": value_cosine,
    "received_attention": received_attention,
    "first": first,
}


def find_sinks(
    model: Any,
    prompts: Prompts,
    detector: str = "cosine",
    *,
    layers: Sequence[int] | None = None,
    space: str = "residual",
    allow_folded: bool = False,
) -> Bool[Tensor, "batch layer head key"]:
    """Where the sinks are, in every layer and head, from one streamed forward pass.

    Args:
        model, prompts: as `capture`.
        detector: a name out of `SINK_DETECTORS`.
        layers: by default all that have attention.
        space: only `value_cosine` depends on it.
        allow_folded: as `capture`.

    Raises:
        InputError: an unknown detector, layer or space, or folded value biases.
        IdentityError, UnsupportedModelError: as `capture`.

    Warns:
        CrowdedSinksWarning: where a detector marks more than `CROWDED_SINKS` of the tokens.
    """
    require_known("detector", detector, SINK_DETECTORS)
    run = capture(
        model,
        prompts,
        layers=layers,
        reduce=SINK_DETECTORS[detector],
        space=space,
        allow_folded=allow_folded,
    )
    device = run.layers[0].device
    sinks = torch.stack([marked.to(device) for marked in run.layers], dim=1)
    warn_if_crowded(sinks, prompts.mask, [c.layer for c in run.certificates], detector)
    return sinks


def protected_share(
    sinks: Bool[Tensor, "batch layer head key"], mask: Bool[Tensor, "batch key"]
) -> Float[Tensor, " layer"]:
    """Share of the real (head, key) pairs of each layer that are marked as sinks."""
    pairs = mask.sum() * sinks.shape[2]
    return sinks.sum(dim=(0, 2, 3)).float() / pairs.to(sinks.device)


def warn_if_crowded(
    sinks: Bool[Tensor, "batch layer head key"],
    mask: Bool[Tensor, "batch key"],
    layers: Sequence[int],
    detector: str,
) -> None:
    """Warns where so many tokens are marked that protecting them says little (SPEC 5).

    One marked token of a short text is no crowd: more than one a head and text must be.

    Warns:
        CrowdedSinksWarning: with the share of each such layer.
    """
    share = protected_share(sinks, mask)
    several = sinks.sum(dim=-1).amax(dim=(0, 2)) > 1
    crowded = [
        f"{layer} ({percentage:.0%})"
        for layer, percentage, more in zip(layers, share.tolist(), several.tolist(), strict=True)
        if percentage > CROWDED_SINKS and more
    ]
    if crowded:
        other = "centred_cosine" if detector != "centred_cosine" else "first"
        warnings.warn(
            f"the {detector} detector marks more than {CROWDED_SINKS:.0%} of the tokens as sinks "
            f"in layers {', '.join(crowded)}. Where many are marked the rule says little; try "
            f"the {other} detector.",
            CrowdedSinksWarning,
            stacklevel=3,
        )


def _cosine_to_first(
    x: Float[Tensor, "batch key d_model"], layer: LayerAttention
) -> Float[Tensor, "batch key"]:
    first_x = x.take_along_dim(layer.first[:, None, None], dim=1)
    size = x.norm(dim=-1) * first_x.norm(dim=-1)
    return torch.where(size > 0, (x * first_x).sum(dim=-1) / size, 0.0)


def _is_first(layer: LayerAttention) -> Bool[Tensor, "batch key"]:
    positions = torch.arange(layer.mask.shape[1], device=layer.mask.device)
    return positions == layer.first[:, None]


def _all_heads(marked: Bool[Tensor, "batch key"], layer: LayerAttention) -> Heads:
    return _marked(marked[:, None].expand(-1, layer.pattern.shape[1], -1), layer)


def _marked(marked: Bool[Tensor, "batch head key"], layer: LayerAttention) -> Heads:
    return marked & layer.mask[:, None]
