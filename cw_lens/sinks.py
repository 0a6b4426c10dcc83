"""Attention sinks: which keys act as one, by several detectors (SPEC 5).

A detector is a function LayerAttention -> [batch, head, key]; it reads the whole layer, all
queries. "First" is the first real position of each example, BOS or not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cw_lens.errors import InputError
from cw_lens.layer import LayerAttention
from cw_lens.metrics import METRICS
from cw_lens.prompts import Prompts
from cw_lens.runs import capture
from cw_lens.scores import layer_scores

SINK_COSINE = 0.95
"""A key is a sink if its vector's cosine to the first key's is above this (paper, appendix)."""
SINK_ATTENTION = 0.3
"""A key is a sink if it receives more than this share of attention."""

Heads = Bool[Tensor, "batch head key"]
Detector = Callable[[LayerAttention], Tensor]


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
) -> Bool[Tensor, "batch layer head key"]:
    """Where the sinks are, in every layer and head, from one streamed forward pass.

    Raises:
        InputError: an unknown detector or layer.
        IdentityError, UnsupportedModelError: as `capture`.
    """
    if detector not in SINK_DETECTORS:
        raise InputError(f"unknown detector {detector!r}; there are {', '.join(SINK_DETECTORS)}.")
    run = capture(model, prompts, layers=layers, reduce=SINK_DETECTORS[detector])
    return torch.stack(run.layers, dim=1)


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
