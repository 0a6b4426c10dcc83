"""What a model loses with the tokens that a metric names: one unit for each text and removal.

A unit is one run of one text without some of its values (SPEC 7). Units of one text run as a batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from cw_lens import backend
from cw_lens.edits import write_routes
from cw_lens.interventions import masked_values
from cw_lens.metrics import METRICS, PAPER_METRICS, Metric
from cw_lens.prompts import Prompts, one_by_one, repeated
from cw_lens.removal import (
    CleanRanking,
    Removal,
    clean_masks,
    clean_ranking,
    online_plan,
)
from cw_lens.runs import attention_sites, layer_indices, require_prompts
from cw_lens.scores import resolve_metrics
from cw_lens.studies.conditions import removals_of
from cw_lens.studies.curves import NO_OP
from cw_lens.studies.losses import Clean, StudyText, losses, require_losses
from cw_lens.studies.text_batches import TextBatches, Units

FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9)
"""What is removed, of the eligible pairs, where nothing else is asked for."""

UNIT_COLUMNS: dict[str, type] = {
    "data": str,
    "example": int,
    "tokens": int,
    "metric": str,
    "remove": str,
    "granularity": str,
    "ranking": str,
    "protected": str,
    "fraction": float,
    "seed": int,
    "removed": int,
    "nll_sum": float,
    "clean_nll_sum": float,
    "kl_sum": float,
    "top1_agreed": int,
}
"""The columns of a table of units, and their types. `tokens` counts all, the first included; sums
are in nats over the predicted ones; `kl_sum` is that of the clean from the masked distribution."""


def faithfulness(
    model: Any,
    prompts: Prompts,
    metrics: Sequence[str] | Mapping[str, Metric] = PAPER_METRICS,
    *,
    fractions: Sequence[float] = FRACTIONS,
    progress: Callable[[int, int], None] | None = None,
    batch_size: int = 8,
    space: str = "residual",
    allow_folded: bool = False,
    **conditions: Any,
) -> pd.DataFrame:
    """One row for each run of a text without some of its values; `removal_curves` reads it.

    Args:
        model: a decoder of TransformerLens, or what `load_model` and `wrap_model` return.
        prompts: from `tokenize`; each example is a text, run without its padding.
        metrics: names out of `METRICS`, or a mapping of names to functions of your own; `random`
            is added.
        fractions: of the eligible pairs to remove, each on its own.
        progress: called with the number of batches done, and of all, after each.
        batch_size: conditions of one text that run at a time.
        space, allow_folded: as `capture`.
        conditions: remove, granularity, ranking, protected and seeds, as `removals_of`.

    Returns:
        The columns of `UNIT_COLUMNS`; `data` is "prompts", `example` the row.

    Raises:
        InputError, IdentityError, UnsupportedModelError: as `removals_of`, `Study` and `capture`.
    """
    functions = resolve_metrics(metrics)
    require_prompts(model, prompts)
    texts = [StudyText("prompts", row, text) for row, text in enumerate(one_by_one(prompts))]
    study = Study(
        model,
        texts,
        removals_of(functions, fractions, **conditions),
        functions,
        batch_size=batch_size,
        space=space,
        allow_folded=allow_folded,
    )
    units = []
    for done, (_batch, found) in enumerate(study.run(), start=1):
        units += found
        if progress is not None:
            progress(done, study.n_batches)
    return pd.DataFrame(units, columns=list(UNIT_COLUMNS))


class Study(TextBatches[Removal]):
    """The units of a list of removals on a list of texts."""

    def __init__(
        self,
        model: Any,
        texts: Sequence[StudyText],
        removals: Sequence[Removal],
        functions: Mapping[str, Metric],
        *,
        batch_size: int = 8,
        space: str = "residual",
        allow_folded: bool = False,
    ):
        """Refuses what would fail later.

        Raises:
            InputError: no texts, one without a token to predict, a batch size below 1, folded
                value biases.
            UnsupportedModelError: a model without next-token predictions, or that cannot be read.
        """
        require_losses(model, texts, batch_size)
        self.model, self.texts = model, list(texts)
        self.functions = {"random": METRICS["random"], **functions}
        self.space, self.allow_folded = space, allow_folded
        self.layers = layer_indices(model, None)
        attention_sites(model, self.layers, space=space, allow_folded=allow_folded)
        routes = write_routes(model, self.layers).values()
        idle = Removal(
            metric="random",  # costs least; everything is done but that nothing is chosen
            remove="highest",
            fraction=0.0,
            ranking="clean" if "value" in routes else "online",
            protected=removals[0].protected,
        )
        self.batches = [[idle], *_batches(removals, batch_size)]
        self.clean_removals = [r for r in (idle, *removals) if r.ranking == "clean"]

    def batches_of(self, text: StudyText) -> list[list[Removal]]:
        """The same for every text."""
        return self.batches

    def units_of(self, text: StudyText, clean: Clean) -> Callable[[Sequence[Removal]], Units]:
        """As `TextBatches`; a text whose clean loss is NaN has nothing to be compared with."""
        ranking: CleanRanking | None = None

        def units(removals: Sequence[Removal]) -> Units:
            nonlocal ranking
            if not math.isfinite(clean.nll_sum):
                return [_failed(text, removal) for removal in removals]
            if removals[0].ranking == "clean" and ranking is None:
                ranking = clean_ranking(
                    self.model,
                    text.prompts,
                    self.clean_removals,
                    self.functions,
                    layers=self.layers,
                    space=self.space,
                    allow_folded=self.allow_folded,
                )
            return self._units(text, clean, ranking, removals)

        return units

    def _units(
        self,
        text: StudyText,
        clean: Clean,
        ranking: CleanRanking | None,
        removals: Sequence[Removal],
    ) -> Units:
        prompts = repeated(text.prompts, len(removals))
        removed = torch.zeros(len(removals), dtype=torch.long)
        if ranking is not None and removals[0].ranking == "clean":
            plan: Any = clean_masks(ranking, removals)
            for mask in plan.values():
                removed += mask.sum(dim=(1, 2)).cpu()
        else:
            plan = online_plan(prompts, removals, self.functions, self.layers, space=self.space)
            plan = replace(plan, choose=_counted(plan.choose, removed))
        with torch.no_grad(), masked_values(self.model, plan):
            logits = backend.forward(self.model, prompts)
        ids = text.prompts.ids[0]
        return [
            {
                **_keys(text, removal),
                "removed": int(removed[row]),
                **losses(logits[row], ids, clean),
            }
            for row, removal in enumerate(removals)
        ]


_OF_REMOVAL = ("metric", "remove", "granularity", "ranking", "protected", "fraction", "seed")


def _keys(text: StudyText, removal: Removal) -> dict[str, Any]:
    """What a unit is; the one that removes nothing is the no-op run."""
    named = removal if removal.fraction else replace(removal, metric=NO_OP)
    return {
        "data": text.data,
        "example": text.example,
        "tokens": text.prompts.ids.shape[1],
        **{name: getattr(named, name) for name in _OF_REMOVAL},
    }


def _failed(text: StudyText, removal: Removal) -> dict[str, Any]:
    """The unit of a text whose clean predictions are NaN already: nothing can be compared."""
    sums = dict.fromkeys(("nll_sum", "clean_nll_sum", "kl_sum"), math.nan)
    return {**_keys(text, removal), "removed": 0, **sums, "top1_agreed": 0}


def _batches(removals: Sequence[Removal], size: int) -> list[list[Removal]]:
    """The removals in order, those that rank alike together, at most `size` in a batch."""
    batches = []
    for ranking in dict.fromkeys(r.ranking for r in removals):
        alike = [r for r in removals if r.ranking == ranking]
        batches += [alike[start : start + size] for start in range(0, len(alike), size)]
    return batches


def _counted(choose: Callable[[Any], Tensor], removed: Int[Tensor, " batch"]) -> Any:
    """The same choice, each example's pairs added to `removed`."""

    def counted(layer: Any) -> Tensor:
        mask = choose(layer)
        removed.add_(mask.sum(dim=(1, 2)).cpu())
        return mask

    return counted
