"""Bootstrap intervals and rank correlation."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

from cw_lens.errors import InputError
from cw_lens.statistics import (
    Estimate,
    bootstrap_mean,
    bootstrap_means,
    bootstrap_together,
    correlation,
    expanded_confidence,
    interval_columns,
    line_r2,
    pair_sums,
    spearman,
)

pytestmark = pytest.mark.apart


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def literal(statistic, samples, n, resamples, seed):
    """Percentiles of a slow bootstrap with the same draws."""
    draw = np.random.default_rng(seed)
    values = []
    for _ in range(resamples):
        places = draw.integers(0, n, size=n)
        values.append(statistic(*(sample[places].mean() for sample in samples)))
    tail = (1 - expanded_confidence(0.95, n)) / 2
    return np.quantile(values, [tail, 1 - tail])


def test_an_interval_is_that_of_a_slow_bootstrap():
    draw = np.random.default_rng(1)
    nll, predicted = draw.exponential(40, size=9), draw.integers(5, 30, size=9).astype(float)

    def perplexity(loss, count):
        return np.exp(loss / count)

    (estimate,) = bootstrap_means(perplexity, nll[None], predicted[None], resamples=800, seed=3)
    assert estimate.value == pytest.approx(np.exp(nll.sum() / predicted.sum()), rel=1e-14)
    low, high = literal(perplexity, (nll, predicted), 9, 800, 3)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), rel=1e-12)
    assert estimate.n == 9


def test_intervals_cover_the_truth_as_often_as_they_say():
    samples = np.random.default_rng(5).normal(size=(1500, 8))
    estimates = bootstrap_means(lambda mean: mean, samples, resamples=1000)
    # plain percentiles reach 0.88 here
    assert np.mean([e.low <= 0 <= e.high for e in estimates]) == pytest.approx(0.95, abs=0.02)


def test_the_expansion_turns_a_normal_interval_into_a_t_interval():
    n, quantile = 8, stats.norm.ppf((1 + expanded_confidence(0.9, 8)) / 2)
    assert quantile * np.sqrt((n - 1) / n) == pytest.approx(stats.t.ppf(0.95, 7), rel=1e-9)
    assert expanded_confidence(0.95, 10_000) == pytest.approx(0.95, abs=1e-4)


def test_each_row_leaves_out_what_is_not_finite():
    rows = np.array([[1.0, 2, 3, 4], [1, np.nan, 3, np.inf], [np.nan] * 4, [5, 2, 3, 4]])
    rows_alone = [bootstrap_mean(row, resamples=200) for row in rows]
    together = bootstrap_means(lambda mean: mean, rows, resamples=200)
    assert [e.n for e in together] == [4, 2, 0, 4]
    assert [e.value for e in together] == pytest.approx([2.5, 2, np.nan, 3.5], nan_ok=True)
    for one, other in zip(together, rows_alone, strict=True):
        assert (one.low, one.high) == pytest.approx((other.low, other.high), nan_ok=True)


def test_an_observation_counts_only_where_all_samples_hold_it():
    first, second = np.array([[1.0, 2, np.nan, 4]]), np.array([[np.nan, 2.0, 3, 8]])
    (ratio,) = bootstrap_means(lambda x, y: x / y, first, second, resamples=50)
    assert (ratio.value, ratio.n) == (0.6, 2)


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ([], Estimate(np.nan, np.nan, np.nan, 0)),
        ([2.0], Estimate(2.0, np.nan, np.nan, 1)),
        ([2.0, 2.0, 2.0], Estimate(2.0, 2.0, 2.0, 3)),
    ],
)
def test_few_or_equal_observations(sample, expected):
    found = bootstrap_mean(sample, resamples=50)
    assert (found.value, found.low, found.high) == pytest.approx(
        (expected.value, expected.low, expected.high), nan_ok=True
    )
    assert found.n == expected.n


def test_seed_and_confidence_and_resamples_matter():
    sample = np.random.default_rng(0).normal(size=20)
    first = bootstrap_mean(sample, seed=1, resamples=300)
    assert first == bootstrap_mean(sample, seed=1, resamples=300)
    assert first != bootstrap_mean(sample, seed=2, resamples=300)
    assert first != bootstrap_mean(sample, seed=1, resamples=301)
    narrow = bootstrap_mean(sample, seed=1, resamples=300, confidence=0.5)
    assert first.low < narrow.low < narrow.high < first.high


def test_rows_drawn_together_give_the_intervals_of_rows_alone():
    rows = np.random.default_rng(2).normal(size=(3, 12))
    together = bootstrap_together(lambda mean: mean, rows, resamples=300, seed=4)
    apart = bootstrap_means(lambda mean: mean, rows, resamples=300, seed=4)
    for one, other in zip(together, apart, strict=True):
        numbers = (other.value, other.low, other.high, other.n)
        assert (one.value, one.low, one.high, one.n) == pytest.approx(numbers, rel=1e-12)
    narrow = bootstrap_together(lambda mean: mean, rows, confidence=0.5, resamples=300, seed=4)
    assert narrow[0].high - narrow[0].low < together[0].high - together[0].low
    with pytest.raises(InputError, match="resamples is 0; at least 1"):
        bootstrap_together(lambda mean: mean, rows, resamples=0)


def test_a_number_of_all_rows_is_that_of_a_slow_bootstrap():
    rows = np.random.default_rng(6).normal(size=(5, 8))

    def share(means):
        return (means < 0).mean(axis=0, keepdims=True)

    (estimate,) = bootstrap_together(share, rows, resamples=400, seed=1)
    draw = np.random.default_rng(1)
    places = [draw.integers(0, 8, size=8) for _ in range(400)]
    values = [(rows[:, place].mean(axis=1) < 0).mean() for place in places]
    tail = (1 - expanded_confidence(0.95, 8)) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    assert (estimate.low, estimate.high, estimate.n) == pytest.approx((low, high, 8))
    assert estimate.value == (rows.mean(axis=1) < 0).mean()


def test_a_number_that_a_draw_leaves_undefined_has_no_interval():
    rows = np.array([[0.0, 1.0, 1.0]])

    def ratio(means):
        return np.concatenate([np.where(means > 0, 1.0, np.nan), means])

    undefined, mean = bootstrap_together(ratio, rows, resamples=200)
    assert undefined.value == 1 and np.isnan([undefined.low, undefined.high]).all()
    assert (mean.low, mean.high) == (0, 1)
    (alone,) = bootstrap_together(lambda mean: mean, rows[:, 1:2], resamples=20)
    assert alone.value == 1 and np.isnan([alone.low, alone.high]).all() and alone.n == 1


def test_columns_of_intervals():
    assert interval_columns("g", [Estimate(1.0, 0.5, 2.0, 7), Estimate(3.0, 2.5, 4.0, 8)]) == {
        "g": [1.0, 3.0],
        "g_low": [0.5, 2.5],
        "g_high": [2.0, 4.0],
        "g_n": [7, 8],
    }


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=12), st.integers(0, 3))
def test_spearman_is_scipys_with_ties(x, seed):
    y = np.random.default_rng(seed).integers(0, 4, size=len(x))
    found = spearman(x, y, resamples=20)
    assert found.n == len(x)
    if len(set(x)) < 2 or len(set(y)) < 2:
        assert np.isnan([found.value, found.low, found.high]).all()
    else:
        assert found.value == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
        assert -1 <= found.low <= found.high <= 1


def test_spearman_draws_pairs():
    x = np.arange(30.0)
    found = spearman(x, x**3, resamples=100)
    assert (found.value, found.low, found.high) == pytest.approx((1, 1, 1))
    y = x + np.random.default_rng(0).normal(0, 12, size=30)
    loose = spearman(x, y, resamples=500)
    assert loose.low < loose.value < loose.high < 1
    assert loose.low > 0


def test_lines_from_sums_are_those_of_scikit_learn():
    draw = np.random.default_rng(2)
    x = 1e4 + draw.exponential(size=60)
    y = 3 * x + draw.normal(size=60)
    groups = draw.integers(0, 3, size=60)
    sums = pair_sums(x, y, groups, 4)
    assert sums[0].tolist() == [*np.bincount(groups), 0]
    for group in range(3):
        held = groups == group
        assert correlation(sums)[group] == pytest.approx(np.corrcoef(x[held], y[held])[0, 1])
        line = LinearRegression().fit(x[~held, None], y[~held])
        fitted = sums.sum(axis=1, keepdims=True) - sums[:, [group]]
        expected = r2_score(y[held], line.predict(x[held, None]))
        assert line_r2(fitted, sums[:, [group]])[0] == pytest.approx(expected, abs=1e-10)
    whole = sums.sum(axis=1, keepdims=True)
    assert line_r2(whole, whole)[0] == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)
    assert correlation(whole / 60)[0] == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert np.isnan(correlation(sums)[3]) and np.isnan(line_r2(whole, sums[:, [3]]))[0]


def test_lines_of_constants():
    y = np.array([1.0, 2.0, 4.0, 0.1])
    groups = np.array([0, 0, 1, 1])
    constant = np.full(4, 0.1)
    sums = pair_sums(constant, y, groups, 2)
    # the line of a constant is the mean: of the other group, 2.05, here held against 1 and 2
    r2 = 1 - (1.05**2 + 0.05**2) / (2 * 0.5**2)
    assert line_r2(sums[:, [1]], sums[:, [0]])[0] == pytest.approx(r2)
    assert np.isnan(correlation(sums)).all()
    turned = pair_sums(y, constant, groups, 2)
    assert np.isnan(line_r2(turned, turned)).all() and np.isnan(correlation(turned)).all()
    # constant within a group alone, where the sums leave rounding
    draw = np.random.default_rng(0)
    groups_of_seven = np.repeat(np.arange(50), 7)
    steps, noise = draw.normal(size=50)[groups_of_seven], draw.normal(size=350)
    sums = pair_sums(steps, noise, groups_of_seven, 50)
    assert np.isnan(correlation(sums)).all()
    assert line_r2(sums, sums) == pytest.approx(0.0, abs=1e-10)
    sums = pair_sums(noise, steps, groups_of_seven, 50)
    assert np.isnan(correlation(sums)).all() and np.isnan(line_r2(sums, sums)).all()
    none = pair_sums(y[:0], y[:0], groups[:0], 2)
    assert none.shape == (6, 2) and np.isnan(line_r2(none, none)).all()


def test_what_cannot_be_right_is_refused():
    with pytest.raises(InputError, match=r"confidence is 95.0; it lies between 0 and 1"):
        bootstrap_mean([1.0, 2.0], confidence=95.0)
    with pytest.raises(InputError, match="resamples is 0; at least 1"):
        spearman([1.0, 2.0], [1.0, 2.0], resamples=0)
    with pytest.raises(InputError, match=r"shapes \(2,\) and \(3,\)"):
        spearman([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(InputError, match="1 of 2 pairs are NaN or infinite"):
        spearman([1.0, np.nan], [1.0, 2.0])
