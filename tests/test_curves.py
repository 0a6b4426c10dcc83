"""Removal curves, areas, comparisons and their sentences, from a table of units."""

import math

import numpy as np
import pandas as pd
import pytest

from cw_lens.errors import InputError
from cw_lens.studies.curves import no_op_failures, removal_curves
from tests.units import AREA, FRACTIONS, made_up_units, one

pytestmark = pytest.mark.apart

FEW = {"resamples": 100}


def literal_point(units, metric, remove, fraction):
    """Perplexity, its change, mean change of loss, KL and agreement, one example at a time."""
    rows = units[
        (units["metric"] == metric) & (units["remove"] == remove) & (units["fraction"] == fraction)
    ]
    nll = clean = predicted = kl = agreed = 0.0
    deltas = []
    for _, example in rows.groupby("example"):
        tokens = example["tokens"].iloc[0] - 1
        mean = sum(example["nll_sum"]) / len(example)
        nll += mean
        clean += example["clean_nll_sum"].iloc[0]
        predicted += tokens
        kl += sum(example["kl_sum"]) / len(example)
        agreed += sum(example["top1_agreed"]) / len(example)
        deltas.append((mean - example["clean_nll_sum"].iloc[0]) / tokens)
    before, after = math.exp(clean / predicted), math.exp(nll / predicted)
    return {
        "predicted": predicted,
        "clean_perplexity": before,
        "perplexity": after,
        "delta_perplexity": after - before,
        "delta_nll": sum(deltas) / len(deltas),
        "kl": kl / predicted,
        "top1_agreement": agreed / predicted,
    }


@pytest.fixture(scope="module")
def units():
    return made_up_units()


@pytest.fixture(scope="module")
def curves(units):
    return removal_curves(units, **FEW)


def test_every_point_is_the_literal_one(units, curves):
    assert len(curves.points) == 2 * 5 * len(FRACTIONS)
    assert "no_op" not in set(curves.points["metric"])
    for row in curves.points.to_dict("records"):
        expected = literal_point(units, row["metric"], row["remove"], row["fraction"])
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-12)
        assert row["n"] == 12
        assert row["n_seeds"] == (3 if row["metric"] == "random" else 1)
        assert row["removed_pairs"] == int(100 * row["fraction"])
        assert row["failed"] == 0
        for name in ("delta_perplexity", "delta_nll"):
            assert row[f"{name}_low"] < row[name] < row[f"{name}_high"]


def test_areas_are_means_over_fractions(units, curves):
    for row in curves.aopc.to_dict("records"):
        points = [
            literal_point(units, row["metric"], row["remove"], fraction) for fraction in FRACTIONS
        ]
        # every example holds every fraction, so the mean of means is the mean
        assert row["aopc"] == pytest.approx(np.mean([p["delta_nll"] for p in points]), rel=1e-12)
        assert row["aopc_delta_perplexity"] == pytest.approx(
            np.mean([p["delta_perplexity"] for p in points]), rel=1e-12
        )
        assert (row["n"], row["fractions"]) == (12, len(FRACTIONS))
        assert row["aopc_low"] < row["aopc"] < row["aopc_high"]


def test_a_failed_unit_leaves_its_example_out_of_its_point(units):
    broken = units.copy()
    hit = (
        (broken["metric"] == "contribution")
        & (broken["remove"] == "highest")
        & (broken["fraction"] == 0.3)
        & (broken["example"] == 4)
    )
    assert hit.sum() == 1
    for column, value in (("nll_sum", np.nan), ("nll_sum", np.inf), ("kl_sum", np.nan)):
        broken = units.copy()
        broken.loc[hit, column] = value
        curves = removal_curves(broken, **FEW)
        point = one(curves.points, metric="contribution", remove="highest", fraction=0.3)
        rest = units[units["example"] != 4]
        expected = literal_point(rest, "contribution", "highest", 0.3)
        assert {name: point[name] for name in expected} == pytest.approx(expected, rel=1e-12)
        assert (point["n"], point["failed"]) == (11, 1)
        assert one(curves.points, metric="contribution", remove="highest", fraction=0.5)["n"] == 12
        assert one(curves.aopc, metric="contribution", remove="highest")["n"] == 11
        for fraction, n in ((AREA, 11), (0.3, 11), (0.5, 12)):
            pair = one(
                curves.comparisons,
                remove="highest",
                metric="contribution",
                role="attention",
                fraction=fraction,
            )
            assert pair["n"] == n
        area = one(
            curves.comparisons,
            remove="highest",
            metric="contribution",
            role="attention",
            fraction=AREA,
        )
        # attention's own area is quoted over the same texts
        assert area["other_value"] == pytest.approx(
            np.mean(
                [literal_point(rest, "attention", "highest", f)["delta_nll"] for f in FRACTIONS]
            )
        )
        assert curves.failed.equals(broken[hit].reset_index(drop=True))


def test_one_failed_seed_is_not_hidden_by_the_others(units):
    broken = units.copy()
    hit = (broken["metric"] == "random") & (broken["seed"] == 1) & (broken["example"] == 0)
    broken.loc[hit, "nll_sum"] = np.nan
    points = removal_curves(broken, **FEW).points.query("metric == 'random'")
    assert set(points["n"]) == {11}
    assert set(points["failed"]) == {1}


def test_a_point_at_which_all_failed_has_no_number(units):
    broken = units.copy()
    broken.loc[(broken["metric"] == "gradient") & (broken["fraction"] == 0.5), "nll_sum"] = np.nan
    curves = removal_curves(broken, **FEW)
    point = one(curves.points, metric="gradient", remove="lowest", fraction=0.5)
    assert (point["n"], point["failed"], point["predicted"]) == (0, 12, 0)
    assert np.isnan(point[["perplexity", "delta_nll", "kl"]].to_numpy(dtype=float)).all()
    area = one(curves.aopc, metric="gradient", remove="lowest")
    assert area["n"] == 0
    assert np.isnan(area[["aopc", "aopc_delta_perplexity"]].to_numpy(dtype=float)).all()
    assert (
        "texts, layer granularity, sinks protected (cosine), removing the highest: gradient "
        "(clean) and attention (online) cannot be compared: no text holds every fraction of both."
        in curves.sentences
    )
    order = curves.comparisons.query("remove == 'highest' and role == 'next best'")["metric"]
    assert "gradient" not in set(order)


def test_a_series_that_lacks_a_fraction_has_no_area_over_all(units):
    units = units[~((units["metric"] == "attention") & (units["fraction"] == 0.9))]
    curves = removal_curves(units, **FEW)
    assert len(curves.points.query("metric == 'attention' and remove == 'lowest'")) == 3
    assert one(curves.aopc, metric="attention", remove="lowest")["n"] == 0


def test_families_stand_apart():
    units = made_up_units(
        {"attention": 1.0, "gradient": 2.0, "random": 0.1},
        data=("a", "b"),
        examples=6,
        granularities=("layer", "global"),
        protected=("cosine", "none"),
    )
    curves = removal_curves(units, **FEW)
    assert len(curves.points) == 8 * 2 * 3 * len(FRACTIONS)
    assert any(
        s.startswith("b, global granularity, sinks not protected, ") for s in curves.sentences
    )
    alone = removal_curves(
        units[(units["data"] == "b") & (units["protected"] == "none")], **FEW
    ).points.query("granularity == 'global'")
    here = curves.points.query("data == 'b' and protected == 'none' and granularity == 'global'")
    pd.testing.assert_frame_equal(alone.reset_index(drop=True), here.reset_index(drop=True))


def test_numbers_do_not_depend_on_the_order_of_rows_and_follow_the_seed(units, curves):
    keys = ["remove", "series", "fraction"]
    mixed = removal_curves(units.sample(frac=1, random_state=3), **FEW)
    pd.testing.assert_frame_equal(
        *(c.points.sort_values(keys).reset_index(drop=True) for c in (curves, mixed)),
        check_exact=True,
    )
    again = removal_curves(units, **FEW)
    pd.testing.assert_frame_equal(again.comparisons, curves.comparisons, check_exact=True)
    other = removal_curves(units, seed=1, **FEW)
    assert not other.points["delta_nll_low"].equals(curves.points["delta_nll_low"])
    narrow = removal_curves(units, confidence=0.5, **FEW)
    assert (narrow.points["delta_nll_low"] > curves.points["delta_nll_low"]).all()


def test_curves_keep_their_dips():
    units = made_up_units({"attention": 1.0})
    units.loc[(units["fraction"] == 0.5), "nll_sum"] = units["clean_nll_sum"] - 1.0
    points = removal_curves(units, **FEW).points.query("remove == 'highest'")
    assert points["delta_nll"].iloc[2] < 0 < points["delta_nll"].iloc[1]
    assert points["delta_perplexity"].iloc[2] < 0


def test_the_no_op_run_must_be_the_clean_run(units):
    assert len(no_op_failures(units)) == 0
    broken = units.copy()
    hits = broken.index[broken["metric"] == "no_op"][[2, 5]]
    broken.loc[hits[0], "nll_sum"] = np.nextafter(broken.loc[hits[0], "nll_sum"], np.inf)
    broken.loc[hits[1], "nll_sum"] = np.nan
    found = no_op_failures(broken)
    assert found["example"].tolist() == broken.loc[hits, "example"].tolist()


def test_what_cannot_be_right_is_refused(units):
    with pytest.raises(InputError, match=r"lacks the columns fraction, kl_sum; it holds data,"):
        removal_curves(units.drop(columns=["kl_sum", "fraction"]))
    with pytest.raises(InputError, match="lacks the columns data, .*; it holds none"):
        removal_curves(pd.DataFrame())
    with pytest.raises(InputError, match="lacks the columns metric; it holds nll_sum"):
        no_op_failures(units[["nll_sum", "clean_nll_sum"]])
    with pytest.raises(InputError, match="holds no curve: 24 rows, all of metric no_op"):
        removal_curves(units[units["metric"] == "no_op"])
    with pytest.raises(InputError, match="holds no curve: 0 rows"):
        removal_curves(units.iloc[:0])
    with pytest.raises(InputError, match="remove is 'middle' in a unit; it is 'highest' or"):
        removal_curves(units.assign(remove="middle"))
    with pytest.raises(InputError, match="example 0 of texts has 1 token; the first token is not"):
        removal_curves(units.assign(tokens=1))
    with pytest.raises(InputError, match=r"2 units occur twice, first example 0 of texts for att"):
        removal_curves(pd.concat([units, units[units["metric"] == "attention"].iloc[:2]]))
