"""The removals of a faithfulness study: every metric, direction and fraction, and the controls."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from cw_lens.errors import InputError, require_known
from cw_lens.metrics import METRICS, Metric
from cw_lens.removal import DIRECTIONS, GRANULARITIES, RANKINGS, UNPROTECTED, Removal
from cw_lens.scores import needs_gradient
from cw_lens.sinks import SINK_DETECTORS
from cw_lens.studies.curves import NO_OP


def removals_of(
    functions: Mapping[str, Metric],
    fractions: Sequence[float],
    *,
    remove: Sequence[str] = ("highest", "lowest"),
    granularity: Sequence[str] = ("layer",),
    ranking: str = "online",
    protected: Sequence[str] = ("cosine",),
    seeds: int = 3,
) -> list[Removal]:
    """Every removal of a study, metrics together.

    `random` is always among them, with seeds from 0. What cannot rank online (the gradient,
    global granularity) ranks from a clean pass.

    Raises:
        InputError: as `Removal`; no fractions, one of 0 (the no-op run is always made), fewer
            than 3 seeds, or a metric of one's own named as a control.
    """
    held = list(fractions) if isinstance(fractions, Sequence | np.ndarray) else []
    if not held or not all(isinstance(f, int | float) and 0 < f <= 1 for f in held):
        raise InputError(
            f"the fractions are {held if held else fractions!r}; give at least one above 0 and up "
            "to 1. The clean run and one that removes nothing are made in any case."
        )
    if functions.get("random", METRICS["random"]) is not METRICS["random"] or NO_OP in functions:
        name = NO_OP if NO_OP in functions else "random"
        raise InputError(f"{name} is the name of a control; give your metric another.")
    if not isinstance(seeds, int) or seeds < 3:
        raise InputError(f"{seeds!r} seeds of the random control are too few; use 3 or more.")
    directions, grains, guards = (
        several(name, values, allowed)
        for name, values, allowed in (
            ("remove", remove, DIRECTIONS),
            ("granularity", granularity, GRANULARITIES),
            ("protected", protected, (*SINK_DETECTORS, UNPROTECTED)),
        )
    )
    several("ranking", ranking, RANKINGS)
    removals = []
    for guarded, grain, metric in product(guards, grains, dict.fromkeys((*functions, "random"))):
        backward = needs_gradient({metric: functions[metric]} if metric in functions else {})
        online = ranking == "online" and grain != "global" and not backward
        removals += [
            Removal(
                metric=metric,
                remove=direction,
                fraction=fraction,
                granularity=grain,
                ranking="online" if online else "clean",
                protected=guarded,
                seed=seed,
            )
            for seed in range(seeds if metric == "random" else 1)
            for direction in directions
            for fraction in sorted(set(held))
        ]
    return removals


def several(name: str, values: str | Sequence[str], allowed: Sequence[str]) -> list[str]:
    """The values, each once, where they are some of those that are allowed."""
    single = isinstance(values, str) or not isinstance(values, Iterable)
    held: list[Any] = [values] if single else list(values)
    for value in held:
        require_known(name, value, allowed)
    if not held:
        raise InputError(f"{name} is empty; name at least one of {', '.join(allowed)}.")
    return list(dict.fromkeys(held))
