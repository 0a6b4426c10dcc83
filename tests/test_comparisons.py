"""Which metric is better: paired differences, verdicts and sentences."""

import numpy as np
import pandas as pd
import pytest

from cw_lens.studies.curves import removal_curves
from cw_lens.study_report import headlines
from tests.units import AREA, FRACTIONS, made_up_units, one

pytestmark = pytest.mark.apart

FEW = {"resamples": 100}


@pytest.fixture(scope="module")
def units():
    return made_up_units()


@pytest.fixture(scope="module")
def curves(units):
    return removal_curves(units, **FEW)


def test_the_known_order_is_found_in_both_directions(curves):
    expected = {
        ("contribution", "attention"): "better",
        ("contribution", "random"): "better",
        ("gradient", "attention"): "better",
        ("random", "attention"): "worse",
        ("attention", "random"): "better",
    }
    for remove in ("highest", "lowest"):
        for (metric, other), verdict in expected.items():
            for fraction in (AREA, *FRACTIONS):
                row = one(
                    curves.comparisons,
                    remove=remove,
                    metric=metric,
                    other=other,
                    role=other,
                    fraction=fraction,
                )
                assert row["verdict"] == verdict, (remove, metric, other, fraction)
                assert row["difference"] == pytest.approx(row["value"] - row["other_value"])
                assert row["n"] == 12
                better_side = 1 if remove == "highest" else -1
                assert (row["difference"] * better_side > 0) == (verdict == "better")


def test_the_next_best_follows_in_the_order_of_the_area(curves):
    for remove in ("highest", "lowest"):
        rows = curves.comparisons.query(f"remove == '{remove}' and role == 'next best'")
        areas = rows[rows["fraction"].isna()]
        assert list(zip(areas["metric"], areas["other"], strict=True)) == [
            ("gradient", "contribution"),
            ("contribution", "twin"),
            ("twin", "attention"),
            ("attention", "random"),
        ]
        assert len(rows) == 4 * (1 + len(FRACTIONS))


def test_equal_metrics_are_not_distinguishable(curves):
    row = one(
        curves.comparisons,
        remove="highest",
        metric="contribution",
        role="next best",
        fraction=AREA,
    )
    assert (row["other"], row["difference"], row["low"], row["high"]) == ("twin", 0, 0, 0)
    assert row["verdict"] == "not distinguishable"


def test_differences_are_paired():
    """A small steady difference shows although texts differ much more among themselves."""
    units = made_up_units({"attention": 1.0, "contribution": 1.02}, no_op=False)
    row = one(
        removal_curves(units, **FEW).comparisons,
        remove="highest",
        metric="contribution",
        role="attention",
        fraction=0.9,
    )
    assert row["difference"] == pytest.approx(0.018, rel=0.2)
    assert row["verdict"] == "better"


def test_sentences_say_it_plainly_and_once(curves):
    start = "texts, layer granularity, sinks protected (cosine), removing the"
    area = one(
        curves.comparisons,
        remove="highest",
        metric="contribution",
        role="attention",
        fraction=AREA,
    )
    numbers = (
        f"(AOPC {area['value']:.3g} against {area['other_value']:.3g} nats per token, difference "
        f"{area['difference']:.3g} [{area['low']:.3g}, {area['high']:.3g}], 12 texts)."
    )
    sentences = curves.sentences
    told = f"{start} highest: contribution harms the model more than attention {numbers}"
    assert told in sentences
    assert any(
        s.startswith(f"{start} lowest: contribution harms the model less than attention (")
        and "difference −" in s
        for s in sentences
    )
    assert any(
        s.startswith(f"{start} highest: contribution and twin are not distinguishable (AOPC ")
        for s in sentences
    )
    pairs = curves.comparisons[curves.comparisons["fraction"].isna()]
    named = {
        (remove, frozenset(pair))
        for remove, *pair in pairs[["remove", "metric", "other"]].itertuples(index=False)
    }
    assert len(sentences) == len(named) < len(pairs)
    # told from the side of the better one
    assert not any("highest: random harms" in sentence for sentence in sentences)


@pytest.mark.parametrize(("examples", "verdict"), [(1, None), (5, None), (6, "better")])
def test_few_texts_give_no_verdict(examples, verdict):
    curves = removal_curves(made_up_units(examples=examples), **FEW)
    row = one(
        curves.comparisons,
        remove="highest",
        metric="contribution",
        role="attention",
        fraction=AREA,
    )
    assert row["verdict"] == (verdict or "too few texts")
    assert np.isnan(row["low"]) == (examples == 1)
    sentence = next(
        s for s in curves.sentences if "highest: contribution" in s and "attention" in s
    )
    assert ("no verdict from fewer than 6 texts" in sentence) == (verdict is None)
    assert f"{examples} text{'s' * (examples > 1)})." in sentence
    assert "nan" not in sentence


def test_a_metric_with_two_rankings_is_two_series(units):
    clean = units[units["metric"] == "contribution"].assign(ranking="clean")
    both = pd.concat([units, clean, units[units["metric"] == "attention"].assign(ranking="clean")])
    curves = removal_curves(both, **FEW)
    names = set(curves.aopc["series"])
    assert {"contribution (clean)", "contribution (online)", "attention (clean)"} < names
    assert {"gradient", "random"} < names
    against = curves.comparisons.query("role == 'attention' and remove == 'highest'")
    pairs = set(zip(against["metric"], against["other"], strict=True))
    assert ("contribution (clean)", "attention (clean)") in pairs
    assert ("contribution (online)", "attention (online)") in pairs
    assert ("gradient", "attention (clean)") in pairs
    assert ("random", "attention (online)") in pairs
    assert not any(metric.startswith("attention") for metric, _ in pairs)


def test_gradient_is_compared_although_its_ranking_is_clean(curves):
    row = one(
        curves.comparisons, remove="highest", metric="gradient", role="attention", fraction=AREA
    )
    assert row["verdict"] == "better"
    assert one(curves.aopc, metric="gradient", remove="highest")["ranking"] == "clean"


def test_without_attention_and_random_there_is_no_such_comparison():
    curves = removal_curves(made_up_units({"contribution": 2.0, "mine": 1.5}), **FEW)
    assert set(curves.comparisons["role"]) == {"next best"}
    alone = removal_curves(made_up_units({"contribution": 2.0}), **FEW)
    assert len(alone.comparisons) == 0
    assert alone.sentences == ()
    assert "verdict" in alone.comparisons.columns


def test_the_headlines_tell_of_contributions_against_attention_whoever_wins():
    units = made_up_units({"attention": 2.0, "contribution": 1.0, "random": 0.1})
    told = headlines(removal_curves(units, resamples=200))
    assert len(told) == 2
    assert all("attention" in line and "contribution" in line for line in told)
    assert ": attention harms the model more than contribution (" in told[0]
    assert ": attention harms the model less than contribution (" in told[1]
    without = made_up_units({"attention": 2.0, "random": 0.1})
    curves = removal_curves(without, resamples=200)
    assert headlines(curves) == curves.sentences[:4]


def test_rankings_that_differ_are_named():
    units = made_up_units({"attention": 1.0, "gradient": 2.0, "random": 0.1})
    units.loc[units["metric"] == "gradient", "ranking"] = "clean"
    told = removal_curves(units, resamples=200).sentences
    assert any(
        ": gradient (clean) harms the model more than attention (online) (" in t for t in told
    )
    assert any(": attention harms the model more than random (" in line for line in told)
