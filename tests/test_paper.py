"""The paper's claims against made-up findings: each verdict is the one that the intervals give."""

import math

import numpy as np
import pandas as pd
import pytest

from cw_lens.errors import InputError
from cw_lens.studies import paper, paper_rows
from cw_lens.studies.components import Components
from cw_lens.studies.concentration import Concentration
from cw_lens.studies.curves import removal_curves
from cw_lens.studies.norm_model import NormModel
from cw_lens.studies.paper_items import ITEMS, curve_removals, named_items, require_rows
from cw_lens.studies.readings import TextReading
from cw_lens.studies.sweep_results import sweep_curves
from cw_lens.studies.sweeps import UNIT_COLUMNS
from tests.units import made_up_units

pytestmark = pytest.mark.apart


def interval(low, high):
    return {"low": low, "high": high}


@pytest.mark.parametrize(
    ("low", "high", "is_above", "is_below"),
    [
        (0.6, 0.7, "yes", "no"),
        (0.1, 0.4, "no", "yes"),
        (0.4, 0.6, "not distinguishable", "not distinguishable"),
        (math.nan, math.nan, "not distinguishable", "not distinguishable"),
    ],
)
def test_an_interval_lies_above_a_level_or_below_or_neither(low, high, is_above, is_below):
    assert paper_rows.above(interval(low, high), 0.5) == is_above
    assert paper_rows.below(interval(low, high), 0.5) == is_below


def test_the_largest_must_lie_above_all_others():
    held = {"a": interval(3.0, 4.0), "b": interval(1.0, 2.0), "c": interval(0.0, 2.5)}
    assert paper_rows.largest(held, "a") == "yes"
    assert paper_rows.largest(held, "b") == "no"
    assert paper_rows.smallest(held, "a") == "no"
    assert paper_rows.smallest(held, "c") == "not distinguishable"
    assert paper_rows.largest(held | {"d": interval(3.5, 5.0)}, "a") == "not distinguishable"
    assert paper_rows.smallest({"a": interval(3.0, 4.0), "b": interval(5.0, 6.0)}, "a") == "yes"


def regressions(first_best="relative_norm * cosine", data="d", shift=0.0):
    rows = []
    for keys in ("all", "first", "other"):
        best = {"first": first_best, "other": "attention * cosine"}.get(keys)
        for name in paper.REGRESSORS:
            r2 = (0.8 if name == best else 0.1) + shift
            row = {"data": data, "keys": keys, "scale": "raw", "regressor": name, "r2": r2}
            rows.append(row | {"low": r2 - 0.05, "high": r2 + 0.05, "texts": 9})
    return pd.DataFrame(rows)


def correlations(signs=(-1, 1, -1)):
    pairs = list(paper.TABLE_2)
    rows = [
        {"data": "d", "keys": "all", "first": x, "second": y, "r": 0.3 * s, "texts": 9}
        | interval(0.3 * s - 0.1, 0.3 * s + 0.1)
        for (x, y), s in zip(pairs, signs, strict=True)
    ]
    return pd.DataFrame(rows)


def found_components(table, signs=(-1, 1, -1)):
    empty = pd.DataFrame()
    return Components(table, correlations(signs), joint=empty, samples=empty)


def by_quantity(rows):
    return {row["quantity"]: row for row in rows}


def test_table_1_and_2_hold_the_printed_numbers_and_verdicts():
    rows = by_quantity(paper.component_rows(found_components(regressions()), "d"))
    assert len(rows) == 3 * 6 + 3
    alone = rows["R² of c on attention, all keys"]
    assert (alone["paper"], alone["here"], alone["texts"]) == (0.055, 0.1, 9)
    assert alone["holds"] == "yes" and alone["item"] == "table1"
    assert rows["R² of c on relative_norm * cosine, first keys"]["holds"] == "yes"
    assert rows["R² of c on attention * cosine, other keys"]["paper"] == 0.834
    assert rows["R² of c on cosine, other keys"]["claim"] == ""
    signs = [rows[name]["holds"] for name in rows if name.startswith("correlation")]
    assert signs == ["yes", "yes", "yes"]
    other = found_components(regressions(first_best="attention"), signs=(1, 1, 0.1))
    rows = by_quantity(paper.component_rows(other, "d"))
    assert rows["R² of c on relative_norm * cosine, first keys"]["holds"] == "no"
    signs = [rows[name]["holds"] for name in rows if name.startswith("correlation")]
    assert signs == ["no", "yes", "not distinguishable"]


def test_table_3_needs_two_corpora_and_takes_the_largest_difference():
    assert paper.corpora_rows(found_components(regressions())) == []
    both = pd.concat([regressions(), regressions(data="e", shift=0.18)])
    rows = paper.corpora_rows(found_components(both))
    assert [row["holds"] for row in rows] == ["not distinguishable"] * 3
    for row in rows:  # each interval is .05 to either side
        held = row["here"], row["low"], row["high"]
        assert held == pytest.approx((0.18, 0.08, 0.28)) and row["texts"] == 9
    for shift, wide, holds in (
        (-0.05, 0.02, "yes"), (-0.05, 0.05, "not distinguishable"), (-0.2, 0.04, "no"),
        (0.05, math.nan, "not distinguishable"),
    ):  # fmt: skip
        both = pd.concat([regressions(), regressions(data="e", shift=shift)])
        both = both.assign(low=both["r2"] - wide, high=both["r2"] + wide)
        rows = paper.corpora_rows(found_components(both))
        assert [row["holds"] for row in rows] == [holds] * 3
    few = pd.concat([regressions().assign(texts=5), regressions(data="e", shift=0.2)])
    assert {row["holds"] for row in paper.corpora_rows(found_components(few))} == {"too few texts"}


def found_concentration(contribution=0.1, entropies=(1.0, 2.0, 1.5), first_ratio=0.2):
    def rows(names, values, **more):
        return [
            {"data": "d", "layer": pd.NA, "weight": n, "value": v, "n": 8} | more
            | interval(v - 0.01, v + 0.01)
            for n, v in zip(names, values, strict=True)
        ]  # fmt: skip

    names = list(paper.TABLE_4)
    with_first = rows(names, entropies, first_key=True)
    without = rows(names, entropies, first_key=False)
    ratios = [
        {"data": "d", "layer": pd.NA, "position": p, "ratio": "sum of c / sum of alpha"}
        | {"value": v, "n": 8} | interval(v - 0.01, v + 0.01)
        for p, v in ((0, first_ratio), (1, 0.9), (2, 1.1))
    ]  # fmt: skip
    return Concentration(
        weights=pd.DataFrame(rows(names, (0.7, 0.2, contribution))),
        entropies=pd.DataFrame(with_first + without),
        amplification=pd.DataFrame(ratios),
        queries=pd.DataFrame(),
    )


def test_tables_4_and_5_and_the_amplification():
    rows = by_quantity(paper.concentration_rows(found_concentration(), "d"))
    assert rows["weight of the first key, attention"]["paper"] == 0.708
    assert rows["weight of the first key, contribution"]["holds"] == "yes"
    assert rows["entropy of attention, with the first key"]["holds"] == "yes"
    assert rows["entropy of contribution, without the first key"]["holds"] == "no"
    assert rows["entropy of contribution, without the first key"]["paper"] == 2.27
    assert rows["c / α at the first key"]["holds"] == "yes"
    other = found_concentration(contribution=0.9, entropies=(1.5, 2.0, 1.0), first_ratio=1.2)
    rows = by_quantity(paper.concentration_rows(other, "d"))
    assert rows["weight of the first key, contribution"]["holds"] == "no"
    assert rows["entropy of attention, with the first key"]["holds"] == "no"
    assert rows["entropy of contribution, without the first key"]["holds"] == "yes"
    assert rows["c / α at the first key"]["holds"] == "no"


def reading(example, **numbers):
    held = {name: np.full((2, 3), number) for name, number in numbers.items()}
    return TextReading("d", example, 5, (0, 1), {"alignment": held, "cone": held})


def test_figure_5a_and_6b_are_means_over_texts():
    texts = [reading(i, first_cosine=-0.3 - i / 100, others_cosine=0.2 + i / 100) for i in range(8)]
    rows = paper.alignment_rows(texts)
    assert [row["holds"] for row in rows] == ["yes", "yes"]
    assert rows[0]["here"] == pytest.approx(-0.335) and rows[0]["paper"] == -0.2
    assert rows[0]["low"] < rows[0]["here"] < rows[0]["high"] and rows[0]["texts"] == 8
    texts = [reading(i, inside=0.5, inside_without=0.5 + (i - 3.5) / 10) for i in range(8)]
    (row,) = paper.cone_rows(texts)
    assert row["here"] == pytest.approx(0) and row["holds"] == "not distinguishable"


def test_figures_5b_and_11_come_from_the_summary():
    summary = pd.DataFrame(
        [
            {"quantity": "negative_g", "value": 0.8, "low": 0.7, "high": 0.9},
            {"quantity": "inner_minimum", "value": 0.3, "low": 0.2, "high": 0.4},
            {"quantity": "r2_norm", "value": 0.5, "low": 0.4, "high": 0.6},
        ]
    )
    rows = paper.norm_rows(NormModel(pd.DataFrame(), summary, fitted=4, undefined=0, texts=7))
    assert [row["item"] for row in rows] == ["fig11", "fig11", "fig5b"]
    assert [row["holds"] for row in rows] == ["yes", "no", "not distinguishable"]
    assert {row["texts"] for row in rows} == {7}


def test_curves_are_held_by_their_areas_each_to_its_figure():
    units = made_up_units(granularities=("layer", "global", "head"), protected=("cosine", "none"))
    rows = paper.curve_rows(removal_curves(units, resamples=200))
    figures = [3, 4, 8, 8, 9, 9, 10, 10]
    assert [row["item"] for row in rows] == [f"fig{number}" for number in figures]
    assert {row["holds"] for row in rows} == {"yes"}
    next_best = made_up_units({"attention": 1.5, "contribution": 2.0, "random": 0.1})
    rows = paper.curve_rows(removal_curves(next_best, resamples=200))
    assert [row["item"] for row in rows] == ["fig3", "fig4"]  # each once
    worse = made_up_units({"attention": 2.0, "contribution": 1.0, "random": 0.1})
    rows = paper.curve_rows(removal_curves(worse, resamples=200))
    assert [row["holds"] for row in rows] == ["no", "no"]


def sweep_units(losses, control=0.0, last=1.0):
    """Units of eight texts whose loss grows by these nats a token at γ = .5 and 0.

    That at 0 is `last` times as much in every other text.
    """
    rows = []
    for example in range(8):
        base = dict.fromkeys(UNIT_COLUMNS, 0) | {"data": "d", "example": example, "tokens": 11}
        base |= {"layers": "0-1", "failed": "", "clean_nll_sum": 30.0, "nll_sum": 30.0}
        base |= {"kl_sum": 0.1, "edit": "no_op", "target": "none", "factor": 1.0}
        rows.append(base)
        for factor, loss in zip((0.5, 0.0), losses, strict=True):
            more = 10 * loss * (1 + example / 100) * (1 if factor or example % 2 else last)
            edit = {"edit": "scale", "factor": factor}
            rows.append(base | edit | {"target": "first", "nll_sum": 30 + more})
            spoiled = 30 + 10 * control * (1 + example / 100)
            for seed in range(3):
                rows.append(base | edit | {"target": "control", "seed": seed, "nll_sum": spoiled})
    return pd.DataFrame(rows).astype(UNIT_COLUMNS)


def test_figure_6c_holds_the_loss_its_order_and_the_control():
    from cw_lens.studies.curves import NO_OP

    def rows(*made):
        units = sweep_units(*made).replace({"edit": {"no_op": NO_OP}})
        return paper.sweep_rows(sweep_curves(units, resamples=200), "d")

    def holds(*made):
        return [row["holds"] for row in rows(*made)]

    assert holds((0.5, 1.0), 0.1) == ["yes", "yes", "yes"]
    assert holds((1.5, 1.0), 2.0) == ["yes", "no", "no"]
    assert holds((-0.5, -1.0), -1.0) == ["no", "no", "not distinguishable"]
    assert holds((0.5, 0.6), 0.0, 0.7)[1] == "not distinguishable"
    step = rows((0.5, 0.8))[1]  # texts weigh 1 to 1.07 times as much; the lower step is .3
    assert step["here"] == pytest.approx(0.3 * 1.035) and step["paper"] != step["paper"]
    assert 0.3 < step["low"] < step["here"] < step["high"] < 0.321
    step = rows((1.5, 1.0))[1]  # the step that fails is shown, not the one that holds
    assert step["here"] == pytest.approx(-0.5 * 1.035) and step["high"] < 0


def test_the_table_names_model_data_and_tokens_and_the_sentences_count():
    rows = [
        paper_rows.paper_row(
            "table4", "q", {"value": 1.0, **interval(0.5, 1.5), "n": 6}, claim="c", holds=h
        )
        | {"data": "d"}
        for h in ("yes", "no", "not distinguishable", "yes")
    ]
    table = paper_rows.paper_table(rows, "m", {"d": 70})
    assert table.columns.tolist() == ["item", "data", *paper_rows.COLUMNS, "tokens", "model"]
    assert set(table["tokens"]) == {70} and set(table["model"]) == {"m"}
    first, second = paper_rows.verdicts(table)
    assert (
        first
        == "Of 4 claims of the paper, of signs and orders, 2 hold here, 1 do not, 1 cannot be told."
    )
    assert second == "table4, d: q is 1 [0.5, 1.5]; that it is c does not hold here."
    assert paper_rows.verdicts(table.assign(claim="")) == ()


def test_few_texts_give_no_verdict():
    found = {"value": 1.0, **interval(0.5, 1.5), "n": 5}
    row = paper_rows.paper_row("table4", "q", found, claim="c", holds="yes")
    assert row["holds"] == "too few texts"
    assert paper_rows.paper_row("table4", "q", found)["holds"] == ""
    table = paper_rows.paper_table([row | {"data": "d"}], "m", {"d": 70})
    assert paper_rows.verdicts(table) == (
        "Of 1 claims of the paper, of signs and orders, 0 hold here, 0 do not, 1 cannot be told.",
    )


def test_items_are_named_in_the_papers_order():
    assert named_items(["fig6c", "table1"]) == ["table1", "fig6c"]
    assert named_items([]) == named_items(["all"]) == list(ITEMS)
    with pytest.raises(InputError, match=r"unknown item 'fig2'; there are table1.*fig12, all\."):
        named_items(["fig2"])


def test_an_item_that_would_stay_empty_is_refused():
    with pytest.raises(InputError, match="table3 compares corpora; name two or more with --data"):
        require_rows(["table1", "table3"], ["d", "d"], (0.0,))
    with pytest.raises(InputError, match="fig6c needs the sink's removal; give 0 among --factors"):
        require_rows(["fig6c"], ["d"], (0.5, 0.25))
    require_rows(["table3", "fig6c"], ["d", "e"], (0.0, 1.0))
    require_rows(["all"], ["d"], (0.5,))


def test_removals_of_several_figures_are_made_once():
    removals, functions = curve_removals(["fig3", "fig8"], (0.1, 0.5), 3)
    assert len(removals) == len(set(removals)) == (4 + 3) * 2 * (1 + 2)
    assert {r.protected for r in removals} == {"cosine", "none"}
    assert list(functions) == [
        "attention", "value_weighted", "value_weighted_output_normalized", "contribution"
    ]  # fmt: skip
    assert curve_removals(["table1"], (0.1,), 3)[0] == []
