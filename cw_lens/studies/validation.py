"""Token scores against measured truth: what the loss does when one single value is taken away.

On a small case every (layer, head, token) is masked on its own, and each metric's score is set
beside the change in loss that this made (SPEC 7). That a metric is aligned with the output by
construction is then no objection: the loss knows nothing of the metric.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch

from cw_lens import backend
from cw_lens.interventions import RankedMasks, masked_values
from cw_lens.metrics import Metric
from cw_lens.prompts import repeated
from cw_lens.runs import layer_indices
from cw_lens.scores import token_scores
from cw_lens.sinks import find_sinks
from cw_lens.statistics import rank_correlation, spearman
from cw_lens.studies.losses import Clean, StudyText, require_losses, sum_nll
from cw_lens.studies.text_batches import TextBatches, Units

EFFECT_COLUMNS: dict[str, type] = {
    "data": str,
    "example": int,
    "layer": int,
    "head": int,
    "position": int,
    "nll_sum": float,
    "clean_nll_sum": float,
}
"""The columns of a table of single ablations, and their types; losses in nats over the text."""

GROUPS = ("all", "without sinks")
EFFECTS = ("size", "harm")


Place = tuple[int, int, int]
"""Layer, head and position of one value."""


class Ablations(TextBatches[Place]):
    """Every value of each text masked on its own."""

    def __init__(
        self,
        model: Any,
        texts: Sequence[StudyText],
        *,
        layers: Sequence[int] | None = None,
        batch_size: int = 32,
    ):
        """Refuses what would fail later; raises as `require_losses` and `layer_indices`."""
        require_losses(model, texts, batch_size)
        self.model, self.texts = model, list(texts)
        self.layers = layer_indices(model, layers)
        self.heads = int(model.cfg.n_heads)
        self.batch_size = batch_size

    def batches_of(self, text: StudyText) -> list[list[Place]]:
        """Every value of the text, layer by layer."""
        positions = range(text.prompts.ids.shape[1])
        places = list(product(self.layers, range(self.heads), positions))
        starts = range(0, len(places), self.batch_size)
        return [places[start : start + self.batch_size] for start in starts]

    def units_of(self, text: StudyText, clean: Clean) -> Callable[[Sequence[Place]], Units]:
        """As `TextBatches`."""

        def units(tried: Sequence[Place]) -> Units:
            rows = [
                (text.data, text.example, *place, loss, clean.nll_sum)
                for place, loss in zip(tried, self._losses(text, tried), strict=True)
            ]
            return [dict(zip(EFFECT_COLUMNS, row, strict=True)) for row in rows]

        return units

    def _losses(self, text: StudyText, tried: Sequence[Place]) -> list[float]:
        length = text.prompts.ids.shape[1]
        where = {
            layer: torch.zeros(len(tried), self.heads, length, dtype=torch.bool)
            for layer in dict.fromkeys(layer for layer, _, _ in tried)
        }
        for row, (layer, head, position) in enumerate(tried):
            where[layer][row, head, position] = True
        with torch.no_grad(), masked_values(self.model, RankedMasks(where)):
            logits = backend.forward(self.model, repeated(text.prompts, len(tried)))
        return [sum_nll(row, text.prompts.ids[0]) for row in logits]


def scored_ablations(
    model: Any,
    texts: Sequence[StudyText],
    ablations: pd.DataFrame,
    functions: Mapping[str, Metric],
    *,
    layers: Sequence[int],
    space: str = "residual",
    allow_folded: bool = False,
) -> pd.DataFrame:
    """The ablations with `delta_nll` (ablated minus clean), `sink`, and a column for each metric.

    Sinks are those of the `cosine` detector. Raises as `token_scores`.
    """
    where: dict[str, Any] = {"layers": layers, "space": space, "allow_folded": allow_folded}
    keys = ["data", "example", "layer", "head", "position"]
    tables = []
    for text in texts:
        scores = token_scores(model, text.prompts, functions, **where)
        sinks = find_sinks(model, text.prompts, **where)[0]
        index = pd.MultiIndex.from_product(
            [[text.data], [text.example], layers, range(sinks.shape[1]), range(sinks.shape[2])],
            names=keys,
        )
        columns = {name: scores[name][0].flatten().tolist() for name in scores.metrics}
        columns["sink"] = sinks.flatten().tolist()
        tables.append(pd.DataFrame(columns, index=index).reset_index())
    table = ablations.merge(pd.concat(tables), on=keys, how="left", validate="one_to_one")
    table.insert(len(EFFECT_COLUMNS), "delta_nll", table["nll_sum"] - table["clean_nll_sum"])
    return table


def validation_table(
    scored: pd.DataFrame, metrics: Sequence[str], *, resamples: int = 1000, seed: int = 0
) -> pd.DataFrame:
    """Rank correlation (Spearman) of each metric's score with the measured effect.

    One row per metric, `among` ("all", "without sinks") and `effect`: "size" is |delta nll|, what
    an unsigned score can know; "harm" is delta nll itself. `rho` with `low` and `high`, a 95 %
    bootstrap interval over the ablated values (which share texts and layers, so that it is too
    narrow for other texts); `within_layers` is the mean of the layers' own correlations, which a
    metric that only knows which layers matter does not get. Ablations whose loss is NaN are left
    out; `n` counts the others.
    """
    rows = []
    held = scored.loc[np.isfinite(scored["delta_nll"])].reset_index(drop=True)
    for among, effect, metric in product(GROUPS, EFFECTS, metrics):
        part = held if among == "all" else held.loc[~held["sink"].astype(bool)]
        change = part["delta_nll"].to_numpy()
        change = np.abs(change) if effect == "size" else change
        score = part[metric].to_numpy()
        found = spearman(score, change, resamples=resamples, seed=seed)
        layers = part.groupby(["data", "example", "layer"]).indices.values()
        own = np.array([rank_correlation(score[at], change[at]) for at in layers])
        own = own[np.isfinite(own)]
        rows.append(
            {
                "metric": metric,
                "among": among,
                "effect": effect,
                "rho": found.value,
                "low": found.low,
                "high": found.high,
                "within_layers": float(own.mean()) if len(own) else np.nan,
                "n": found.n,
            }
        )
    return pd.DataFrame(rows)


def validation_sentences(table: pd.DataFrame) -> tuple[str, ...]:
    """What was found, for the size of the effect over all values, the best metric first."""
    caveat = (
        "Intervals are over the values ablated, which share texts and layers: other texts may lie "
        "further away."
    )
    shown = table.loc[(table["among"] == "all") & (table["effect"] == "size")]
    rows = sorted(shown.to_dict("records"), key=lambda row: -np.nan_to_num(row["rho"], nan=-2))
    found = (
        f"{row['metric']}: rank correlation {row['rho']:.2f} [{row['low']:.2f}, "
        f"{row['high']:.2f}] with the size of the measured change in loss, "
        f"{row['within_layers']:.2f} within layers ({row['n']} values)."
        if np.isfinite(row["rho"])
        else f"{row['metric']}: no rank correlation, because all its scores or effects are equal."
        for row in rows
    )
    return (*found, caveat)
