"""Runs timed in turn, so that what else the machine does meets all of them alike."""

import statistics
import time
from collections.abc import Callable

ROUNDS = 7


def side_by_side(
    runs: dict[str, Callable[[], object]], rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Seconds of each run, taken in turn after a warm-up of each."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name] += seconds_of(run, 1)
    return seconds


def seconds_of(run: Callable[[], object], times: int) -> list[float]:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return taken


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
