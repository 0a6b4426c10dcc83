"""One text through one model: what each token gives, beside the attention it gets."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cw_lens import backend
from cw_lens.certificates import Certificate
from cw_lens.errors import InputError
from cw_lens.geometry import low_outputs
from cw_lens.identity import model_identity
from cw_lens.layer import LayerAttention
from cw_lens.metrics import Metric
from cw_lens.prompts import Prompts
from cw_lens.runs import LowOutputWarning, Run, capture, layer_indices, next_token_nll
from cw_lens.scores import (
    TokenScores,
    layer_scores,
    needs_gradient,
    resolve_metrics,
    stacked_scores,
)
from cw_lens.sinks import cosine, warn_if_crowded
from cw_lens.studies.heads import HeadProfile, head_profile, layer_head_statistics

SHOWN_METRICS = (
    "attention",
    "value_weighted",
    "value_weighted_output_normalized",
    "contribution",
    "signed_contribution",
    "intra_head_contribution",
    "stream_contribution",
)
"""What `explain` scores by default: all that one forward pass gives at little cost."""


@dataclass(frozen=True, eq=False)
class Explanation:
    """One text, read by one model.

    Attributes:
        prompts: the text, a batch of one.
        scores: token scores of every layer and head.
        heads: what each head of every layer gives.
        sinks: the positions that the `cosine` detector marks, layer by layer.
        layers: the layers chosen to be shown whole.
        certificates: one for each layer of the model that has attention.
        nll: loss in nats of each token from the second on; empty where the model predicts none.
        model: the model's identity; empty where a run was read without its model.
    """

    prompts: Prompts
    scores: TokenScores
    heads: HeadProfile
    sinks: Bool[Tensor, "layer key"]
    layers: tuple[LayerAttention, ...]
    certificates: tuple[Certificate, ...]
    nll: Float[Tensor, " predicted"]
    model: dict[str, Any]


def explain(
    model: Any,
    prompts: Prompts,
    *,
    layers: Sequence[int] | None = None,
    metrics: Sequence[str] = SHOWN_METRICS,
    progress: Callable[[int], None] | None = None,
    space: str = "residual",
    allow_folded: bool = False,
) -> Explanation:
    """Everything that the page of `cw-lens explain` shows, from one streamed pass and the loss.

    Args:
        model: any model of TransformerLens, or what `load_model` and `wrap_model` return.
        prompts: one text, from `tokenize`.
        layers: the layers to keep whole; by default the three in which the first key's
            attention is furthest from its contribution.
        metrics: what to score tokens by; those of `SHOWN_METRICS` are always scored.
        progress: called with the number of layers done after each.
        space, allow_folded: as `capture`.

    Raises:
        InputError: more than one text, an unknown layer, metric or space, folded value biases.
        IdentityError, UnsupportedModelError: as `capture`.

    Warns:
        CrowdedSinksWarning: where the `cosine` detector marks most tokens.
    """
    if len(prompts) != 1:
        raise InputError(f"explain takes one text; the prompts hold {len(prompts)}.")
    functions = resolve_metrics(tuple(dict.fromkeys((*SHOWN_METRICS, *metrics))))
    indices = layer_indices(model, None)
    where: dict[str, Any] = {"space": space, "allow_folded": allow_folded}
    chosen = None if layers is None else layer_indices(model, layers)
    kept: dict[int, LayerAttention] = {}
    done = 0

    def reduce(layer: LayerAttention) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        nonlocal done
        if chosen is not None and layer.index in chosen:
            kept[layer.index] = layer
        summary = (
            layer_scores(layer, functions),
            layer_head_statistics(layer),
            cosine(layer)[0, 0],
        )
        done += 1
        if progress is not None:
            progress(done)
        return summary

    run = capture(model, prompts, reduce=reduce, gradient=needs_gradient(functions), **where)
    scores, statistics, rows = zip(*run.layers, strict=True)
    sinks = torch.stack([row.to(rows[0].device) for row in rows])
    warn_if_crowded(sinks[None, :, None], prompts.mask, indices, "cosine")
    heads = head_profile(statistics, indices)
    if chosen is None:
        chosen = _most_misleading(heads)
        with warnings.catch_warnings():  # the first pass has said it
            warnings.simplefilter("ignore", LowOutputWarning)
            again = capture(model, prompts, layers=chosen, **where)
        kept = {layer.index: layer for layer in again.layers}
    nll = torch.empty(0)
    if backend.predicts_next_token(model):
        nll = next_token_nll(model, prompts)[0]
    return Explanation(
        prompts=prompts,
        scores=stacked_scores(scores, run.certificates),
        heads=heads,
        sinks=sinks,
        layers=tuple(kept[index] for index in chosen),
        certificates=run.certificates,
        nll=nll,
        model=model_identity(model),
    )


def explanations(
    run: Run[Any], metrics: Mapping[str, Metric] | None = None
) -> tuple[Explanation, ...]:
    """Each text of a run by itself, without its padding: what views are made of.

    The scores, profiles and sinks are those of the layers that the run holds; the loss and the
    model's identity are left empty.

    Args:
        run: from `capture` or `from_cache`, with its layers kept.
        metrics: functions to score tokens by, beside `SHOWN_METRICS`.

    Raises:
        InputError: a metric that returns NaN or a wrong shape, a run whose layers were reduced, or
            that holds none.
    """
    if not run.layers or not all(isinstance(layer, LayerAttention) for layer in run.layers):
        held = type(run.layers[0]).__name__ if run.layers else "no layer"
        raise InputError(
            f"a view is drawn from a run's attention layers; this run holds {held}. Use "
            "capture(model, prompts) without reduce."
        )
    functions = {**resolve_metrics(SHOWN_METRICS), **(metrics or {})}
    indices = [layer.index for layer in run.layers]
    found = []
    for row in range(len(run.prompts)):
        layers = tuple(layer.text(row) for layer in run.layers)
        scores = [layer_scores(layer, functions) for layer in layers]
        certificates = tuple(
            replace(one, low_outputs=int(low_outputs(layer).sum()))
            for one, layer in zip(run.certificates, layers, strict=True)
        )
        found.append(
            Explanation(
                prompts=run.prompts.text(row),
                scores=stacked_scores(scores, certificates),
                heads=head_profile([layer_head_statistics(layer) for layer in layers], indices),
                sinks=torch.stack([cosine(layer)[0, 0].cpu() for layer in layers]),
                layers=layers,
                certificates=certificates,
                nll=torch.empty(0),
                model={},
            )
        )
    return tuple(found)


def _most_misleading(heads: HeadProfile, count: int = 3) -> list[int]:
    """The layers in which the first key's attention is furthest from what it gives."""
    gap = (heads.first_attention.mean(dim=1) - heads.first_contribution.sum(dim=1)).abs()
    strongest = gap.argsort(descending=True)[:count].tolist()
    return sorted(heads.layers[row] for row in strongest)
