"""Which (head, key) pairs to remove: the highest or lowest fraction by token score (SPEC 7)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cw_lens.errors import InputError, require_known
from cw_lens.interventions import OnlinePlan, RankedMasks
from cw_lens.layer import LayerAttention
from cw_lens.metrics import METRICS, Metric, random
from cw_lens.prompts import Prompts
from cw_lens.runs import attention_sites, capture, layer_indices, require_prompts
from cw_lens.scores import layer_scores, needs_gradient, resolve_metrics
from cw_lens.sinks import SINK_DETECTORS

DIRECTIONS = ("highest", "lowest")
GRANULARITIES = ("layer", "head", "global")
RANKINGS = ("online", "clean")
UNPROTECTED = "none"
"""The name of protecting no sinks."""

_ROUNDING = 1e-9  # 0.7 * 10 pairs are 7, whatever floating point makes of it


@dataclass(frozen=True)
class Removal:
    """What one example loses.

    Attributes:
        metric: the name of the metric whose token scores rank the pairs.
        remove: "highest" (comprehensiveness) or "lowest" (sufficiency) scores first.
        fraction: of the eligible pairs; floor(fraction * eligible + 1e-9) are removed.
        granularity: pairs are ranked within a "layer", jointly over its heads; within a "head";
            or "global", over all layers.
        ranking: scores come from the very pass that is masked, layer by layer ("online"), or
            from a "clean" pass before it.
        protected: the detector whose sinks are not eligible, or "none".
        seed: of the `random` metric; other metrics ignore it.

    Raises:
        InputError: a value that is none of these, or a global plan that ranks online.
    """

    metric: str
    remove: str
    fraction: float
    granularity: str = "layer"
    ranking: str = "online"
    protected: str = "cosine"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("remove", DIRECTIONS),
            ("granularity", GRANULARITIES),
            ("ranking", RANKINGS),
            ("protected", (*SINK_DETECTORS, UNPROTECTED)),
        ):
            require_known(name, getattr(self, name), allowed)
        if not isinstance(self.fraction, int | float) or not 0 <= self.fraction <= 1:
            raise InputError(f"the fraction is {self.fraction!r}; it must be from 0 to 1.")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 31:
            raise InputError(f"the seed is {self.seed!r}; it must be a whole number from 0.")
        if self.ranking == "online" and (self.granularity == "global" or self.metric == "gradient"):
            raise InputError(
                f"{self.metric}, {self.granularity} granularity: one threshold over all layers, "
                'and gradients, come from a clean pass. Use ranking="clean" (--ranking clean).'
            )


@dataclass(frozen=True, eq=False)
class CleanRanking:
    """Scores and sinks of a clean pass, from which plans are made.

    Attributes:
        scores: (metric, seed) -> [batch, layer, head, key].
        sinks: detector -> [batch, layer, head, key].
        mask: True at real tokens.
        layers: the number of each layer along that axis.
    """

    scores: Mapping[tuple[str, int], Float[Tensor, "batch layer head key"]]
    sinks: Mapping[str, Bool[Tensor, "batch layer head key"]]
    mask: Bool[Tensor, "batch key"]
    layers: tuple[int, ...]


def removal_plan(
    model: Any,
    prompts: Prompts,
    metric: str | Mapping[str, Metric] = "contribution",
    *,
    remove: str = "highest",
    fraction: float = 0.1,
    granularity: str = "layer",
    ranking: str = "online",
    protected: str = "cosine",
    seed: int = 0,
    layers: Sequence[int] | None = None,
    space: str = "residual",
    allow_folded: bool = False,
) -> OnlinePlan | RankedMasks:
    """What to give to `masked_values`, to run these prompts without some of their values.

    In each example the pairs of a query head and a key are ranked by token score. Ties go to the
    lower (head, key), over layers to the lower layer; sinks and padding are not eligible.

    Args:
        model: any model of TransformerLens, or what `load_model` and `wrap_model` return.
        prompts: from `tokenize`; the model must then be run on these.
        metric: a name out of `METRICS`, or a mapping of one name to a function of your own.
        remove, fraction, granularity, ranking, protected, seed: as `Removal`. Plans that rank
            globally, or by gradient, need ranking="clean".
        layers: the layers in which values are removed; by default all that have attention.
        space, allow_folded: as `capture`.

    Returns:
        Masks by layer if the ranking is clean, else an `OnlinePlan`.

    Raises:
        InputError: as `Removal` and `token_scores`.
        IdentityError, UnsupportedModelError: as `capture`.
    """
    functions = resolve_metrics([metric] if isinstance(metric, str) else metric)
    if len(functions) != 1:
        raise InputError(f"a plan ranks by one metric; {len(functions)} were given.")
    require_prompts(model, prompts)
    removal = Removal(
        next(iter(functions)), remove, fraction, granularity, ranking, protected, seed
    )
    where: dict[str, Any] = {"layers": layers, "space": space, "allow_folded": allow_folded}
    return plan_of(model, prompts, removal, functions, **where)


def plan_of(
    model: Any,
    prompts: Prompts,
    removal: Removal,
    functions: Mapping[str, Metric],
    *,
    layers: Sequence[int] | None = None,
    space: str = "residual",
    allow_folded: bool = False,
) -> OnlinePlan | RankedMasks:
    """The plan of one removal, the same for every example; raises as `removal_plan`."""
    removals = [removal] * len(prompts)
    indices = layer_indices(model, layers)
    attention_sites(model, indices, space=space, allow_folded=allow_folded)
    if removal.ranking == "online":
        return online_plan(prompts, removals, functions, indices, space=space)
    clean = clean_ranking(
        model, prompts, removals, functions, layers=indices, space=space, allow_folded=allow_folded
    )
    return clean_masks(clean, removals)


def online_plan(
    prompts: Prompts,
    removals: Sequence[Removal],
    functions: Mapping[str, Metric],
    layers: Sequence[int],
    *,
    space: str = "residual",
) -> OnlinePlan:
    """One removal for each example, chosen layer by layer in the pass that is masked."""
    if needs_gradient({r.metric: functions[r.metric] for r in removals}):
        raise InputError('gradients come from a clean pass. Use ranking="clean" (--ranking clean).')
    groups = _runs_of([(r.metric, r.seed, r.protected) for r in removals])

    def choose(layer: LayerAttention) -> Bool[Tensor, "batch head key"]:
        masks = []
        for (metric, seed, protected), rows in groups:
            part = layer.examples(rows)
            # an example that became NaN in a layer before has nothing to rank, nor a loss
            sound = part.output.isfinite().flatten(1).all(dim=1)
            if not sound.any():
                masks += [torch.zeros_like(part.pattern[0, :, 0], dtype=torch.bool)] * len(sound)
                continue
            function = _seeded(functions[metric], seed)
            score = layer_scores(part, {metric: function}, sound=sound)[metric]
            eligible = _eligible(score, part.mask) & sound[:, None, None]
            if protected != UNPROTECTED:
                eligible = eligible & ~SINK_DETECTORS[protected](part)
            masks += [
                lost_pairs(score[row], eligible[row], removal)
                for row, removal in enumerate(removals[rows])
            ]
        return torch.stack(masks)

    return OnlinePlan(prompts, tuple(layers), choose, space)


def clean_ranking(
    model: Any,
    prompts: Prompts,
    removals: Sequence[Removal],
    functions: Mapping[str, Metric],
    *,
    layers: Sequence[int],
    space: str = "residual",
    allow_folded: bool = False,
) -> CleanRanking:
    """What these removals are ranked by, from one pass; raises as `capture`."""
    keys = dict.fromkeys((r.metric, r.seed) for r in removals)
    detectors = dict.fromkeys(r.protected for r in removals if r.protected != UNPROTECTED)

    def reduce(layer: LayerAttention) -> tuple[list[Tensor], list[Tensor]]:
        scored = layer_scores(
            layer, {f"{m}:{seed}": _seeded(functions[m], seed) for m, seed in keys}
        )
        return list(scored.values()), [SINK_DETECTORS[name](layer) for name in detectors]

    run = capture(
        model,
        prompts,
        layers=layers,
        reduce=reduce,
        gradient=needs_gradient({m: functions[m] for m, _ in keys}),
        space=space,
        allow_folded=allow_folded,
    )
    device = run.layers[0][0][0].device
    scores = [torch.stack([t.to(device) for t in per], dim=1) for per in _columns(run.layers, 0)]
    sinks = [torch.stack([t.to(device) for t in per], dim=1) for per in _columns(run.layers, 1)]
    return CleanRanking(
        scores=dict(zip(keys, scores, strict=True)),
        sinks=dict(zip(detectors, sinks, strict=True)),
        mask=prompts.mask.to(device),
        layers=tuple(layers),
    )


def clean_masks(ranking: CleanRanking, removals: Sequence[Removal]) -> RankedMasks:
    """One removal for each example; a ranking of one example serves all of them."""
    masks = []
    for number, removal in enumerate(removals):
        row = number if len(ranking.mask) > 1 else 0
        score = ranking.scores[removal.metric, removal.seed][row]
        eligible = _eligible(score, ranking.mask[row])
        if removal.protected != UNPROTECTED:
            eligible = eligible & ~ranking.sinks[removal.protected][row]
        masks.append(lost_pairs(score, eligible, removal))
    stacked = torch.stack(masks)
    return RankedMasks({layer: stacked[:, at] for at, layer in enumerate(ranking.layers)})


def lost_pairs(
    score: Float[Tensor, "*layer head key"],
    eligible: Bool[Tensor, "*layer head key"],
    removal: Removal,
) -> Bool[Tensor, "*layer head key"]:
    """The pairs that one example loses: floor(fraction * eligible + 1e-9) of each ranked group.

    Ties go to the lower index.
    """
    axes = {"head": 1, "layer": 2, "global": score.ndim}[removal.granularity]
    grouped = score.flatten(-axes) if axes > 1 else score
    eligible = eligible.flatten(-axes) if axes > 1 else eligible
    highest = removal.remove == "highest"
    ranked = grouped.masked_fill(~eligible, float("-inf") if highest else float("inf"))
    order = ranked.sort(dim=-1, descending=highest, stable=True).indices
    counts = (removal.fraction * eligible.sum(dim=-1, keepdim=True).double() + _ROUNDING).floor()
    chosen = torch.arange(grouped.shape[-1], device=score.device) < counts
    lost = torch.zeros_like(eligible).scatter(-1, order, chosen.expand_as(order))
    return (lost & eligible).reshape(score.shape)


def _seeded(function: Metric, seed: int) -> Metric:
    return partial(random, seed=seed) if function is METRICS["random"] and seed else function


def _eligible(
    score: Float[Tensor, "*axes head key"], mask: Bool[Tensor, "*some key"]
) -> Bool[Tensor, "*axes head key"]:
    return mask.to(score.device)[..., None, :].expand(score.shape)


def _runs_of(keys: Sequence[Any]) -> list[tuple[Any, slice]]:
    """Equal neighbours together, each with the slice that they are."""
    runs: list[tuple[Any, slice]] = []
    for at, key in enumerate(keys):
        if runs and runs[-1][0] == key:
            runs[-1] = (key, slice(runs[-1][1].start, at + 1))
        else:
            runs.append((key, slice(at, at + 1)))
    return runs


def _columns(
    rows: Sequence[tuple[list[Tensor], list[Tensor]]], at: int
) -> list[tuple[Tensor, ...]]:
    return list(zip(*(row[at] for row in rows), strict=True))
