"""Which studies each table and figure of the paper needs, and the removals of its curves."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from cw_lens.errors import InputError, require_known
from cw_lens.metrics import PAPER_METRICS, Metric
from cw_lens.removal import Removal
from cw_lens.runs import layer_indices
from cw_lens.scores import resolve_metrics
from cw_lens.studies.concentration import layer_concentration
from cw_lens.studies.conditions import removals_of
from cw_lens.studies.edge_samples import layer_components, sampling_rates
from cw_lens.studies.losses import StudyText
from cw_lens.studies.readings import LayerStudy
from cw_lens.studies.sinks import SINK_STUDIES

COMPONENTS, CONCENTRATION, ALIGNMENT = "components", "concentration", "alignment"
NORM_MODEL, CONE, SWEEP, CURVES = "norm_model", "cone", "sweep", "curves"

ITEMS = {
    "table1": COMPONENTS,
    "table2": COMPONENTS,
    "table3": COMPONENTS,
    "table4": CONCENTRATION,
    "table5": CONCENTRATION,
    "fig3": CURVES,
    "fig4": CURVES,
    "fig5a": ALIGNMENT,
    "fig5b": NORM_MODEL,
    "fig6a": CONE,
    "fig6b": CONE,
    "fig6c": SWEEP,
    "fig7": COMPONENTS,
    "fig8": CURVES,
    "fig9": CURVES,
    "fig10": CURVES,
    "fig11": NORM_MODEL,
    "fig12": CONCENTRATION,
}
"""Table or figure -> the study that makes it. fig12 is the amplification of appendix D.6."""

_CURVES: dict[str, dict[str, Any]] = {
    "fig3": {"remove": ("highest",)},
    "fig4": {"remove": ("lowest",)},
    "fig8": {"protected": ("none",)},
    "fig9": {"granularity": ("global",)},
    "fig10": {"granularity": ("head",)},
}


def named_items(names: Sequence[str]) -> list[str]:
    """The tables and figures named, in the paper's order; all for none or "all".

    Raises:
        InputError: an unknown one.
    """
    for name in names:
        require_known("item", name, (*ITEMS, "all"))
    return [item for item in ITEMS if not names or "all" in names or item in names]


def require_rows(names: Sequence[str], data: Sequence[str], factors: Sequence[float]) -> None:
    """Refuses an item, named by itself, that these corpora and factors would leave empty.

    Raises:
        InputError: table3 of one corpus, fig6c without a removal.
    """
    if "table3" in names and len(set(data)) < 2:
        raise InputError("table3 compares corpora; name two or more with --data.")
    if "fig6c" in names and 0 not in factors:
        raise InputError("fig6c needs the sink's removal; give 0 among --factors.")


def curve_removals(
    items: Sequence[str], fractions: Sequence[float], seeds: int
) -> tuple[list[Removal], Mapping[str, Metric]]:
    """The removals of the curves among the items, each once, and the metrics that rank them.

    Raises:
        InputError: as `removals_of`.
    """
    functions = resolve_metrics(PAPER_METRICS)
    removals = [
        removal
        for item, options in _CURVES.items()
        if item in items
        for removal in removals_of(functions, fractions, seeds=seeds, **options)
    ]
    return list(dict.fromkeys(removals)), functions


def streamed_studies(
    needed: Collection[str], model: Any, texts: Sequence[StudyText], points: int
) -> dict[str, LayerStudy]:
    """What one pass must read for these studies; the sinks too, where a sweep or a second pass is.

    Args:
        needed: names of studies.
        model: whose size, with the texts', says which share of the edges makes `points`.
        texts: to read.
        points: of the regressions, at most.
    """
    studies: dict[str, LayerStudy] = {}
    if COMPONENTS in needed:
        heads, layers = int(model.cfg.n_heads), len(layer_indices(model, None))
        lengths = [text.prompts.ids.shape[1] for text in texts]
        rates = sampling_rates(lengths, heads, layers, points)
        studies[COMPONENTS] = partial(layer_components, **rates)
    if CONCENTRATION in needed:
        studies[CONCENTRATION] = layer_concentration
    for name in (ALIGNMENT, NORM_MODEL, CONE):
        if name in needed:
            studies[name] = SINK_STUDIES[name]
    if {SWEEP, CONE} & set(needed):
        studies["sinks"] = SINK_STUDIES["sinks"]
    return studies
