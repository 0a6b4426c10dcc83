"""Bootstrap intervals, rank correlation and lines: thin calls into scipy, and sums that merge.

Intervals are percentile bootstrap intervals, expanded for the number of observations. They are
defined for tied data, where BCa is not, and they follow every monotone change of scale: the
interval of a perplexity is the exponential of the interval of its mean loss. Plain percentiles,
and BCa too, are too narrow for few observations; the expansion makes up for it (Hesterberg 2015).
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from scipy import stats

from cw_lens.errors import InputError

CONFIDENCE = 0.95
BATCH_NUMBERS = 1 << 17
"""Numbers drawn at once: they stay in a processor's cache, and memory stays small."""

_ROUNDING = 1e-13  # of a variance, in units of that of all points


@dataclass(frozen=True)
class Estimate:
    """A number with the interval that its sampling allows.

    Attributes:
        value: the statistic of the sample itself; NaN where it is not defined.
        low, high: ends of the interval; NaN for fewer than two observations.
        n: how many observations it rests on.
    """

    value: float
    low: float
    high: float
    n: int


def bootstrap_means(
    statistic: Callable[..., np.ndarray],
    *samples: Float[np.ndarray, "row observation"],
    confidence: float = CONFIDENCE,
    resamples: int = 10_000,
    seed: int = 0,
) -> list[Estimate]:
    """Row by row, a function of the means of paired samples, with its interval over observations.

    An observation is drawn together with its number in each sample; one that is not finite in some
    sample is left out of that row. The same seed draws the same observations for all rows that
    hold the same. Where all observations are equal the interval has no width.

    Args:
        statistic: takes the mean of each sample, as arrays [row, draw], and returns [row, draw].
        samples: one number per row and observation, observations in the same order.
        confidence: the share of samples whose interval holds the truth.
        resamples: how often to draw.
        seed: of the draws.

    Raises:
        InputError: a confidence outside (0, 1), or no resamples.
    """
    _check(confidence, resamples)
    held = np.logical_and.reduce([np.isfinite(sample) for sample in samples])
    estimates: list[Estimate] = [Estimate(np.nan, np.nan, np.nan, 0)] * len(held)
    for pattern in np.unique(held, axis=0):
        n = int(pattern.sum())
        if n == 0:
            continue
        rows = np.flatnonzero((held == pattern).all(axis=1))
        numbers = [sample[rows][:, pattern] for sample in samples]

        def of_draw(drawn: np.ndarray, axis: int, numbers: list = numbers, n: int = n):
            # how often each observation was drawn; far fewer numbers than the draws themselves
            counts = _counts(drawn.reshape(-1, n), n)
            totals = (np.einsum("ro,do->rd", sample, counts) for sample in numbers)
            values = statistic(*(total / n for total in totals))
            return values.reshape(len(values), *drawn.shape[:-1])

        values = statistic(*(sample.mean(axis=1, keepdims=True) for sample in numbers))[:, 0]
        lows, highs = _interval(of_draw, (np.arange(n),), confidence, resamples, seed)
        ends = zip(np.broadcast_to(lows, len(rows)), np.broadcast_to(highs, len(rows)), strict=True)
        for row, value, (low, high) in zip(rows, values, ends, strict=True):
            estimates[row] = Estimate(float(value), float(low), float(high), n)
    return estimates


def bootstrap_mean(
    observations: ArrayLike,
    *,
    confidence: float = CONFIDENCE,
    resamples: int = 10_000,
    seed: int = 0,
) -> Estimate:
    """The mean of the finite observations, with its bootstrap interval.

    For two paired samples give their differences.

    Raises:
        InputError: as `bootstrap_means`.
    """
    options = {"confidence": confidence, "resamples": resamples, "seed": seed}
    return bootstrap_means(lambda x: x, np.asarray(observations, dtype=float)[None], **options)[0]


def bootstrap_together(
    statistic: Callable[[np.ndarray], np.ndarray],
    sample: Float[np.ndarray, "row observation"],
    *,
    confidence: float = CONFIDENCE,
    resamples: int = 1000,
    seed: int = 0,
) -> list[Estimate]:
    """Numbers made of the means of all rows, each with its interval over observations.

    As `bootstrap_means`, for numbers that several rows have a part in, such as the share of rows
    with some property: an observation is drawn for all rows at once, and none is left out. Where
    a draw leaves a number undefined its interval is NaN.

    Args:
        statistic: takes the means as [row, draw] and returns [number, draw].
        sample: one number per row and observation.
        confidence, resamples, seed: as `bootstrap_means`.

    Raises:
        InputError: as `bootstrap_means`.
    """
    _check(confidence, resamples)
    n = sample.shape[1]

    def of_draw(drawn: np.ndarray, axis: int):
        values = statistic(sample @ _counts(drawn.reshape(-1, n), n).T / n)
        return values.reshape(len(values), *drawn.shape[:-1])

    values = statistic(sample.mean(axis=1, keepdims=True))[:, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # a NaN says it
        lows, highs = _interval(of_draw, (np.arange(n),), confidence, resamples, seed)
    ends = np.broadcast_arrays(values, lows, highs)
    return [Estimate(*map(float, row), n=n) for row in zip(*ends, strict=True)]


def interval_columns(name: str, estimates: Sequence[Estimate]) -> dict[str, list]:
    """Columns of a table: `name`, `name`_low, `name`_high, and `name`_n observations."""
    ends = {"": "value", "_low": "low", "_high": "high", "_n": "n"}
    return {name + end: [getattr(e, field) for e in estimates] for end, field in ends.items()}


def spearman(
    x: ArrayLike,
    y: ArrayLike,
    *,
    confidence: float = CONFIDENCE,
    resamples: int = 1000,
    seed: int = 0,
) -> Estimate:
    """Rank correlation from −1 to 1, ties sharing their mean rank, with its bootstrap interval.

    NaN where x or y is constant. Within the interval a draw that came out constant counts as 0.

    Raises:
        InputError: x and y of different lengths, NaN or infinite numbers, or as `bootstrap_means`.
    """
    _check(confidence, resamples)
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if x.shape != y.shape or x.ndim != 1:
        raise InputError(
            f"x and y need one number per observation each; they have shapes {x.shape} and "
            f"{y.shape}."
        )
    broken = int((~np.isfinite(x) | ~np.isfinite(y)).sum())
    if broken:
        raise InputError(f"{broken} of {len(x)} pairs are NaN or infinite; leave them out.")
    value = rank_correlation(x, y)
    if np.isnan(value):
        return Estimate(np.nan, np.nan, np.nan, len(x))
    low, high = _interval(_rank_correlation, (x, y), confidence, resamples, seed)
    return Estimate(value, float(low), float(high), len(x))


def rank_correlation(x: ArrayLike, y: ArrayLike) -> float:
    """Spearman's rank correlation alone, of finite numbers; NaN where x or y is constant."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(np.unique(x)) < 2 or len(np.unique(y)) < 2:
        return float("nan")
    return float(_rank_correlation(x, y, axis=-1))


def pair_sums(
    x: Float[np.ndarray, " point"],
    y: Float[np.ndarray, " point"],
    groups: Int[np.ndarray, " point"],
    n_groups: int,
) -> Float[np.ndarray, "sum group"]:
    """Of each group of points n, and the sums of x, y, x^2, xy and y^2: what lines are made of.

    x and y are brought to mean 0 and deviation 1 over all points first, which changes neither a
    correlation nor an R^2; a constant is 0. Sums of groups added up are those of both together.
    """
    x, y = _standardised(x), _standardised(y)
    terms = (np.ones_like(x), x, y, x * x, x * y, y * y)
    sums = [np.bincount(groups, weights=term, minlength=n_groups) for term in terms]
    return np.stack(sums).astype(float)  # whole numbers where there is no point


def correlation(sums: Float[np.ndarray, "sum group *axes"]) -> Float[np.ndarray, "group *axes"]:
    """Pearson's correlation from `pair_sums`, or their means; NaN where x or y is constant."""
    _, _, xx, xy, yy = _central(sums)
    known = (xx > 0) & (yy > 0)
    return np.divide(xy, np.sqrt(xx * yy), out=np.full_like(xy, np.nan), where=known)


def line_r2(
    fitted: Float[np.ndarray, "sum group *axes"], held: Float[np.ndarray, "sum group *axes"]
) -> Float[np.ndarray, "group *axes"]:
    """R^2 at some points of the least-squares line of y on x fitted to others, from `pair_sums`.

    1 - sum of (y - line)^2 / sum of (y - mean of y there)^2, as scikit-learn's r2_score of its
    LinearRegression: at most 1, and negative where the mean would do better. The line of a constant
    x is the mean. NaN where y is constant, or there are no points.
    """
    x, y, xx, xy, _ = _central(fitted)
    slope = np.divide(xy, xx, out=np.zeros_like(xy), where=xx > 0)
    held_x, held_y, held_xx, held_xy, held_yy = _central(held)
    shift = held_y - y - slope * (held_x - x)
    error = held_yy - 2 * slope * held_xy + slope**2 * held_xx + shift**2
    return 1 - np.divide(error, held_yy, out=np.full_like(error, np.nan), where=held_yy > 0)


def expanded_confidence(confidence: float, n: int) -> float:
    """The level whose percentile interval covers a mean of `n` observations with `confidence`.

    1 − 2 Φ(−√(n / (n − 1)) t), t the quantile of Student's t with n − 1 degrees of freedom: what
    makes a t interval of a normal one with the divisor n. Hesterberg 2015, "What Teachers Should
    Know About the Bootstrap".
    """
    quantile = stats.t.ppf((1 + confidence) / 2, n - 1)
    return float(1 - 2 * stats.norm.cdf(-np.sqrt(n / (n - 1)) * quantile))


def _standardised(x: Float[np.ndarray, " point"]) -> Float[np.ndarray, " point"]:
    x = x.astype(float)
    if len(x) == 0 or np.ptp(x) == 0:
        return np.zeros_like(x)
    return (x - x.mean()) / x.std()


def _central(sums: Float[np.ndarray, "sum group *axes"]) -> tuple[np.ndarray, ...]:
    """Means of x and y, and their variances around the covariance; one of rounding alone is 0."""
    n, *totals = sums
    x, y, xx, xy, yy = np.divide(totals, n, out=np.full_like(sums[1:], np.nan), where=n > 0)
    xx, xy, yy = xx - x * x, xy - x * y, yy - y * y
    return x, y, np.where(xx > _ROUNDING, xx, 0.0), xy, np.where(yy > _ROUNDING, yy, 0.0)


def _check(confidence: float, resamples: int) -> None:
    if not 0 < confidence < 1:
        raise InputError(f"confidence is {confidence}; it lies between 0 and 1, such as 0.95.")
    if resamples < 1:
        raise InputError(f"resamples is {resamples}; at least 1 is needed, 1,000 are reasonable.")


def _interval(
    statistic: Callable, samples: tuple, confidence: float, resamples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the expanded percentile interval; NaN for one observation."""
    n = len(samples[0])
    if n < 2:
        return np.array(np.nan), np.array(np.nan)
    result = stats.bootstrap(
        samples,
        statistic,
        n_resamples=resamples,
        batch=max(1, BATCH_NUMBERS // n),
        vectorized=True,
        paired=len(samples) > 1,
        confidence_level=expanded_confidence(confidence, n),
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return np.asarray(result.confidence_interval.low), np.asarray(result.confidence_interval.high)


def _counts(drawn: Int[np.ndarray, "draw n"], n: int) -> Float[np.ndarray, "draw n"]:
    """How often each of n observations is in each draw."""
    places = drawn + n * np.arange(len(drawn))[:, None]
    return np.bincount(places.ravel(), minlength=drawn.size).reshape(-1, n).astype(float)


def _rank_correlation(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    """Pearson's correlation of the ranks along the axis; 0 where one is constant."""
    ranks = [stats.rankdata(sample, axis=axis) for sample in (x, y)]
    first, second = (rank - rank.mean(axis=axis, keepdims=True) for rank in ranks)
    size = np.sqrt((first**2).sum(axis=axis) * (second**2).sum(axis=axis))
    product = (first * second).sum(axis=axis)
    return np.divide(product, size, out=np.zeros_like(size), where=size > 0)
