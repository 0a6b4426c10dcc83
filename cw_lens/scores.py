"""Token scores: how much each token matters to those that see it, streamed over layers (SPEC 4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cw_lens.certificates import Certificate
from cw_lens.errors import InputError, require_known
from cw_lens.layer import LayerAttention
from cw_lens.metrics import METRICS, PAPER_METRICS, Metric
from cw_lens.prompts import Prompts
from cw_lens.runs import capture

QUERY_BLOCK = 64
"""Queries scored at a time: keeps a block of edges in the processor's cache."""


@dataclass(frozen=True, eq=False)
class TokenScores:
    """One score for each token, per layer and head; `scores[name]` is a metric's tensor.

    Attributes:
        values: metric name -> [batch, layer, head, key], 0 at padding.
        layers: the number of each layer along that axis.
        certificates: one for each layer.
    """

    values: Mapping[str, Float[Tensor, "batch layer head key"]]
    layers: tuple[int, ...]
    certificates: tuple[Certificate, ...]

    def __getitem__(self, metric: str) -> Float[Tensor, "batch layer head key"]:
        if metric not in self.values:
            raise KeyError(f"no scores of {metric!r}; there are {', '.join(self.values)}.")
        return self.values[metric]

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics scored."""
        return tuple(self.values)


def token_scores(
    model: Any,
    prompts: Prompts,
    metrics: Sequence[str] | Mapping[str, Metric] = PAPER_METRICS,
    *,
    layers: Sequence[int] | None = None,
    space: str = "residual",
    allow_folded: bool = False,
) -> TokenScores:
    """Token scores of every layer and head, from one forward pass, one layer in memory at a time.

    score of key j = sum over real queries i >= j of metric_ij / number of those queries; for a
    bidirectional model the mean over all real queries. `gradient` adds a forward and backward pass.

    Args:
        model: any model of TransformerLens, or what `load_model` and `wrap_model` return.
        prompts: from `tokenize`.
        metrics: names out of `METRICS`, or a mapping of names to functions of your own.
        layers: the layers to score, by default all that have attention.
        space, allow_folded: as `capture`.

    Raises:
        InputError: an unknown metric, layer or space, folded value biases, or a metric that
            returns NaN or a wrong shape.
        IdentityError, UnsupportedModelError: as `capture`.
    """
    functions = resolve_metrics(metrics)
    run = capture(
        model,
        prompts,
        layers=layers,
        reduce=lambda layer: layer_scores(layer, functions),
        gradient=needs_gradient(functions),
        space=space,
        allow_folded=allow_folded,
    )
    return stacked_scores(run.layers, run.certificates)


def resolve_metrics(metrics: Sequence[str] | Mapping[str, Metric]) -> dict[str, Metric]:
    """Name -> function; names are looked up in `METRICS`.

    Raises:
        InputError: an unknown name, naming the valid ones, or no metric at all.
    """
    if isinstance(metrics, str):
        metrics = [metrics]
    if not isinstance(metrics, Sequence | Mapping):
        raise InputError(
            f"metrics is a {type(metrics).__name__}; give names out of METRICS, or a mapping of "
            "names to functions."
        )
    if not metrics:
        raise InputError(f"no metrics asked for; there are {', '.join(METRICS)}.")
    if isinstance(metrics, Mapping):
        for name, function in metrics.items():
            if not callable(function):
                raise InputError(
                    f"metric {name!r} is a {type(function).__name__}; it must be a function of a "
                    "LayerAttention."
                )
        return dict(metrics)
    for name in metrics:
        require_known("metric", name, METRICS)
    return {name: METRICS[name] for name in metrics}


def needs_gradient(functions: Mapping[str, Metric]) -> bool:
    """Whether a metric among them reads `z_gradient`."""
    return METRICS["gradient"] in functions.values()


def layer_scores(
    layer: LayerAttention,
    functions: Mapping[str, Metric],
    *,
    sound: Bool[Tensor, " batch"] | None = None,
) -> dict[str, Float[Tensor, "batch head key"]]:
    """Each metric's token scores in one whole layer, in blocks of queries.

    Args:
        layer: all of it.
        functions: by name.
        sound: examples whose scores must be finite, by default all; the others score 0.

    Raises:
        InputError: a metric that returns NaN, infinity or a wrong shape.
    """
    batch, heads, _, keys = layer.pattern.shape
    totals = {name: layer.pattern.new_zeros(batch, heads, keys) for name in functions}
    shipped = set(METRICS.values())
    for block in layer.query_blocks(QUERY_BLOCK):
        seen = block.mask.shape[1]
        for name, function in functions.items():
            edges = function(block)
            if not isinstance(edges, Tensor):
                raise InputError(
                    f"metric {name!r} returned a {type(edges).__name__} for layer {layer.index}; "
                    "it must return a tensor of [batch, head, query, key]."
                )
            if edges.shape != block.pattern.shape:
                raise InputError(
                    f"metric {name!r} returned shape {tuple(edges.shape)} for layer "
                    f"{layer.index}; it must be {tuple(block.pattern.shape)} "
                    "(batch, head, query, key)."
                )
            if function not in shipped:  # those are 0 where a query does not see a key
                edges = edges.masked_fill(~block.edge_mask[:, None], 0.0)
            totals[name][:, :, :seen] += edges.sum(dim=2)
    if sound is not None:
        broken = ~sound[:, None, None]
        totals = {name: total.masked_fill(broken, 0.0) for name, total in totals.items()}
    for name, total in totals.items():
        if not total.isfinite().all():
            raise InputError(
                f"metric {name!r} gives NaN or infinite scores in layer {layer.index}; "
                "it must be finite wherever a query sees a key."
            )
    queries = layer.edge_mask.sum(dim=1).clamp_min(1)[:, None]
    return {name: total / queries for name, total in totals.items()}


def stacked_scores(
    per_layer: Sequence[Mapping[str, Tensor]], certificates: Sequence[Certificate]
) -> TokenScores:
    """The scores of several layers as one `TokenScores`, on the device of the first."""
    values = {
        name: torch.stack([scores[name].to(first.device) for scores in per_layer], dim=1)
        for name, first in per_layer[0].items()
    }
    layers = tuple(certificate.layer for certificate in certificates)
    return TokenScores(values=values, layers=layers, certificates=tuple(certificates))
