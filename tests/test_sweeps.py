"""Sweeps of the sink's value: units against literal runs, and curves against literal sums."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

import cw_lens
from cw_lens import backend
from cw_lens.errors import InputError
from cw_lens.interventions import edited_values
from cw_lens.prompts import one_by_one, prompts_from_ids
from cw_lens.sites import UnsupportedModelError
from cw_lens.studies import sweeps
from cw_lens.studies.comparisons import EQUAL, FEW
from cw_lens.studies.curves import NO_OP
from cw_lens.studies.losses import StudyText
from cw_lens.studies.sweep_results import LESS, MORE, sweep_curves
from cw_lens.studies.sweeps import (
    UNIT_COLUMNS,
    Sweep,
    control_tokens,
    layers_text,
    sweep_conditions,
)
from cw_lens.value_edits import SURGERY, EditPlan, ValueEdit
from tests.families import prompts, wrapped
from tests.units import one

FEW_DRAWS = {"resamples": 200}
FACTORS = (1.0, 1.5, 0.5, 0.0)
SETTINGS = {"detector": "centred_cosine"}


def texts_of(given):
    return [StudyText("tiny", row, text) for row, text in enumerate(one_by_one(given))]


def sweep(model, lengths=(9, 6), **options):
    texts = texts_of(prompts(model, lengths))
    return Sweep(model, texts, [0, 1], sweep_conditions(FACTORS), **{**SETTINGS, **options})


def table(study):
    units = [unit for _, units in study.run() for unit in units]
    return pd.DataFrame(units, columns=list(UNIT_COLUMNS))


def logp(model, given):
    with torch.no_grad():
        return backend.forward(model, given)[0].double().log_softmax(dim=-1)


@pytest.fixture(scope="module")
def model():
    return wrapped("llama")


@pytest.fixture(scope="module")
def units(model):
    return table(sweep(model))


def test_the_conditions_are_each_factor_target_and_seed():
    held = sweep_conditions(FACTORS, seeds=4)
    assert len(held) == len(set(held)) == 2 * 3 + 4 * 3 + 4 * 3 + 2 * 4
    assert not any(edit.changes_nothing for edit in held)
    random = [edit for edit in held if edit.kind == "random"]
    assert {edit.factor for edit in random} == {1.0, 1.5, 0.5}
    assert {edit.target for edit in random} == {"first"}
    controls = [edit for edit in held if edit.target == "control"]
    assert {edit.seed for edit in controls} == {0, 1, 2, 3}
    assert {edit.kind for edit in controls} == {"scale"}
    few = sweep_conditions([0.0], targets=["sinks"], surgery=[])
    assert [edit.target for edit in few] == ["sinks", *["control"] * 3]


def test_units_are_what_literal_runs_give(model, units):
    """Each unit against one pass of one text with masks of where its target is, or one edit."""
    assert len(units) == 2 * (1 + len(sweep_conditions(FACTORS)))
    assert set(units["layers"]) == {"0-1"} and set(units["failed"]) == {""}
    texts = one_by_one(prompts(model, (9, 6)))
    sinks_of = [cw_lens.find_sinks(model, text, "centred_cosine") for text in texts]
    clean_of = [logp(model, text) for text in texts]
    for unit in units[units["edit"] != NO_OP].to_dict("records"):
        text, sinks, clean = (held[unit["example"]] for held in (texts, sinks_of, clean_of))
        length = text.ids.shape[1]
        target = unit["target"]
        if target == "control":
            tokens = control_tokens(text, sinks[0])
            target = tokens[unit["seed"] % len(tokens)]
            assert 0 < target < length - 1 and not sinks[0, :, :, target].any()
        if unit["edit"] == "scale" and target != "sinks":
            mask = torch.zeros(1, 4, length, dtype=torch.bool)
            mask[:, :, 0 if target == "first" else target] = True
            context = cw_lens.scaled_values(model, unit["factor"], {0: mask, 1: mask})
        elif unit["edit"] == "scale":
            context = cw_lens.scaled_values(model, unit["factor"], positions="centred_cosine")
        else:
            edit = ValueEdit(unit["edit"], unit["factor"], target, unit["seed"])
            context = edited_values(model, EditPlan(text, [edit], **SETTINGS))
        expected = 2 * 4
        with context:
            found = logp(model, text)
            if target == "sinks":
                expected = int(cw_lens.find_sinks(model, text, "centred_cosine").sum())
        assert unit["changed"] == expected and unit["tokens"] == length
        ids = text.ids[0]
        nll = -sum(found[i, ids[i + 1]].item() for i in range(length - 1))
        assert unit["nll_sum"] == pytest.approx(nll, rel=1e-5)
        nll = -sum(clean[i, ids[i + 1]].item() for i in range(length - 1))
        assert unit["clean_nll_sum"] == pytest.approx(nll, rel=1e-5)
        kl = (clean.exp() * (clean - found))[:-1].sum().item()
        assert unit["kl_sum"] == pytest.approx(kl, rel=1e-3, abs=1e-5)
        same = clean.argmax(dim=-1) == found.argmax(dim=-1)
        assert unit["top1_agreed"] == int(same[:-1].sum())


def test_the_no_op_run_is_the_clean_run_bit_for_bit(units):
    idle = units[units["edit"] == NO_OP]
    assert len(idle) == 2 and set(idle["target"]) == {"none"} and set(idle["factor"]) == {1.0}
    assert (idle["nll_sum"] == idle["clean_nll_sum"]).all()
    assert (idle["kl_sum"] == 0).all() and (idle["changed"] == 0).all()
    others = units[units["edit"] != NO_OP]
    assert (others["nll_sum"] != others["clean_nll_sum"]).all()


def test_the_no_op_run_does_all_but_change(model, monkeypatch):
    """Its plan reads the layers where an edit of the study does."""
    plans, original = [], sweeps.edited_rows
    monkeypatch.setattr(
        sweeps, "edited_rows", lambda m, plan: plans.append(plan) or original(m, plan)
    )
    list(sweep(model, (5,)).run())
    assert plans[0].reads_layer and [edit.changes_nothing for edit in plans[0].edits] == [True]
    plans.clear()
    texts = texts_of(prompts(model, (5,)))
    list(Sweep(model, texts, [0], [ValueEdit("scale", 0.5)]).run())
    assert [plan.reads_layer for plan in plans] == [False, False]


def test_a_sweep_taken_up_again_gives_what_it_would_have_given(model):
    """Whatever was done before, the batches that are left come out bit for bit."""
    whole = dict(sweep(model).run())
    total = sweep(model).n_batches
    assert sorted(whole) == list(range(total))
    for done in ({0, 3, 5}, set(range(total - 1)), set(range(0, total, 2))):
        rest = dict(sweep(model).run(done))
        assert set(rest) == set(whole) - done
        assert all(rest[batch] == whole[batch] for batch in rest)
    assert list(sweep(model).run(range(total))) == []


def test_batches_of_conditions_equal_one_at_a_time(model, units):
    alone = table(sweep(model, batch_size=1))
    names = ["nll_sum", "clean_nll_sum", "kl_sum"]
    assert alone.drop(columns=names).equals(units.drop(columns=names))
    torch.testing.assert_close(
        torch.tensor(alone[names].to_numpy()),
        torch.tensor(units[names].to_numpy()),
        rtol=1e-5,
        atol=1e-5,
    )


def test_what_cannot_be_edited_is_told_and_costs_its_own_units_alone(model):
    """Two tokens leave no control; tokens that are all alike are all sinks, without a mean."""
    given = prompts_from_ids(model, [[5, 9], [6, 6, 6, 6], [5, 9, 7, 8]])
    study = Sweep(model, texts_of(given), [0], sweep_conditions([0.5]))
    units = table(study)
    lost = units["nll_sum"].isna()
    assert (lost == (units["failed"] != "")).all() and (lost == units["kl_sum"].isna()).all()
    control, cut = units["target"] == "control", units["edit"].isin(SURGERY)
    example = units["example"]
    assert (lost == ((control & (example < 2)) | (cut & (example == 1)))).all()
    assert set(units.loc[lost & control, "failed"]) == {sweeps.NO_CONTROL}
    assert set(units.loc[lost & cut, "failed"]) == {
        "layer 0: no value beside those of the first token and the sinks"
    }
    assert not units["clean_nll_sum"].isna().any() and (units.loc[lost, "changed"] == 0).all()


def test_losses_that_are_not_finite_are_kept_as_such(model, monkeypatch):
    original = backend.forward

    def broken(model, given):
        logits = original(model, given)
        if len(logits) > 1:
            logits[1] = torch.nan
        return logits

    monkeypatch.setattr(backend, "forward", broken)
    texts = texts_of(prompts(model, (5,)))
    conditions = [ValueEdit("scale", factor) for factor in (0.5, 0.25, 0.0)]
    units = table(Sweep(model, texts, [0], conditions))
    assert units["failed"].tolist() == ["", "", "the edited loss is not finite", ""]
    assert units["nll_sum"].isna().tolist() == [False, False, True, False]
    monkeypatch.setattr(backend, "forward", lambda m, given: original(m, given) * torch.nan)
    units = table(Sweep(model, texts, [0], sweep_conditions()))
    assert set(units["failed"]) == {"the clean loss is not finite"}
    assert units[["nll_sum", "clean_nll_sum", "kl_sum"]].isna().all(axis=None)


def test_control_tokens_are_drawn_for_the_text(model):
    given = prompts(model, (12, 12))
    texts = one_by_one(given)
    none = torch.zeros(2, 4, 12, dtype=torch.bool)
    order = control_tokens(texts[0], none)
    assert sorted(order) == list(range(1, 11)) and order != sorted(order)
    assert control_tokens(texts[0], none) == order != control_tokens(texts[1], none)
    one_head = none.clone()
    one_head[1, 3, order[0]] = True
    assert control_tokens(texts[0], one_head) == order[1:]


def test_layers_are_named_as_ranges():
    assert layers_text([0, 1, 2, 3, 5]) == "0-3,5"
    assert layers_text([4]) == "4"
    assert layers_text([1, 3, 4]) == "1,3-4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factors": []}, r"the factors are \[\]; give at least one, such as 0.5"),
        ({"factors": [math.nan]}, "the factor is nan; it must be a finite number"),
        ({"targets": ["control"]}, "unknown targets 'control'; there are first, sinks"),
        ({"targets": []}, "targets is empty; name at least one of first, sinks"),
        ({"surgery": ["scale"]}, "unknown surgery 'scale'; there are keep_parallel"),
        ({"seeds": 2}, "2 seeds of the controls are too few; use 3 or more"),
    ],
)
def test_conditions_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        sweep_conditions(**options)


def test_sweeps_that_make_no_sense_are_refused(model):
    texts, held = texts_of(prompts(model, (5,))), sweep_conditions()
    for (given, layers, conditions), options, message in (
        (([], [0], held), {}, "no texts: give at least one"),
        ((texts, [0], held), {"batch_size": 0}, "a batch size of 0"),
        ((texts, [9], held), {}, "layer 9 does not exist"),
        ((texts, [], held), {}, "no layers asked for"),
        ((texts, [0], [ValueEdit()]), {}, "no conditions: give edits of the first token"),
        ((texts, [0], [ValueEdit("mean", target=2)]), {}, "the target 2 is a number: give edits"),
        ((texts, [0], held), {"detector": "bos"}, "unknown detector 'bos'"),
        ((texts, [0], held), {"space": "outer"}, "unknown space 'outer'"),
    ):
        with pytest.raises(InputError, match=message):
            Sweep(model, given, layers, conditions, **options)
    bert = wrapped("bert")
    with pytest.raises(UnsupportedModelError, match="does not predict the next token"):
        Sweep(bert, texts_of(prompts(bert, (5,))), [0], held)


# curves


HARM = {
    ("scale", "first"): 1.0,
    ("scale", "sinks"): 1.0,
    ("scale", "control"): 0.1,
    ("random", "first"): 0.7,
}


def made_up(examples=12, seeds=3):
    """Units in which a value harms by its strength times what it lost, noise by example."""
    draw = np.random.default_rng(0)
    rows = []
    for example in range(examples):
        predicted = int(draw.integers(20, 200))
        clean = float(draw.normal(3.3, 0.3) * predicted)
        text = {"data": "texts", "example": example, "tokens": predicted + 1, "layers": "2-5"}
        text |= {"clean_nll_sum": clean, "failed": ""}
        changes = [(NO_OP, "none", 1.0, 0, 0.0)]
        for (edit, target), strength in HARM.items():
            for factor in (0.5, 0.0) if edit == "scale" else (0.5,):
                for seed in range(1 if target in ("first", "sinks") and edit == "scale" else seeds):
                    size = strength * (1 - factor) * draw.normal(1, 0.2)
                    changes.append((edit, target, factor, seed, size))
        changes.append(("random", "first", 1.0, 0, 2.0 + draw.normal(0, 0.1)))
        for kind, size in (("keep_parallel", 1.0), ("keep_orthogonal", 0.2), ("mean", 1.0)):
            changes.append((kind, "first", 1.0, 0, size + draw.normal(0, 0.1)))
        for *key, change in changes:
            rows.append(
                text
                | dict(zip(("edit", "target", "factor", "seed"), key, strict=True))
                | {"changed": 36 * (change != 0), "nll_sum": clean + change * predicted}
                | {"kl_sum": abs(change) * predicted / 2}
                | {"top1_agreed": predicted - 5 * (change != 0)}
            )
    return pd.DataFrame(rows)[list(UNIT_COLUMNS)]


@pytest.fixture(scope="module")
def made():
    return made_up()


@pytest.fixture(scope="module")
def curves(made):
    return sweep_curves(made, **FEW_DRAWS)


def literal_point(rows):
    """Sums over texts, a text's seeds averaged first, one text at a time."""
    nll = clean = predicted = kl = agreed = changed = 0.0
    deltas = []
    for _, text in rows.groupby("example"):
        tokens = text["tokens"].iloc[0] - 1
        mean = sum(text["nll_sum"]) / len(text)
        nll, clean = nll + mean, clean + text["clean_nll_sum"].iloc[0]
        predicted += tokens
        kl += sum(text["kl_sum"]) / len(text)
        agreed += sum(text["top1_agreed"]) / len(text)
        changed += sum(text["changed"]) / len(text) / rows["example"].nunique()
        deltas.append((mean - text["clean_nll_sum"].iloc[0]) / tokens)
    before, after = math.exp(clean / predicted), math.exp(nll / predicted)
    return {
        "n": len(deltas),
        "predicted": predicted,
        "clean_perplexity": before,
        "perplexity": after,
        "delta_perplexity": after - before,
        "delta_nll": sum(deltas) / len(deltas),
        "kl": kl / predicted,
        "top1_agreement": agreed / predicted,
        "changed_values": changed,
    }


def test_every_point_is_the_literal_one(made, curves):
    held = made[made["edit"] != NO_OP].groupby(["edit", "target", "factor"]).groups
    whole = {("scale", target, 1.0) for target in ("first", "sinks", "control")}
    found = curves.points.set_index(["edit", "target", "factor"])
    assert set(found.index) == set(held) | whole
    for key, point in found.iterrows():
        rows = made.loc[held[key]] if key in held else made[made["edit"] == NO_OP]
        expected = literal_point(rows)
        assert {name: point[name] for name in expected} == pytest.approx(expected, rel=1e-12)
        assert point["data"] == "texts" and point["layers"] == "2-5" and point["failed"] == 0
        assert point["n_seeds"] == rows["seed"].nunique()
        for name in ("delta_perplexity", "delta_nll"):
            inside = point[f"{name}_low"] < point[name] < point[f"{name}_high"]
            assert inside or (key in whole and point[f"{name}_low"] == point[f"{name}_high"] == 0)


def test_the_comparisons_are_of_paired_texts(made, curves):
    table = curves.comparisons
    roles = table.groupby("role").size().to_dict()
    assert roles == {"step": 4, "control": 4, "sinks": 2, "random": 2, "surgery": 6}
    pair = one(table, role="control", target="first", factor=0.5)
    texts = made.assign(delta=(made["nll_sum"] - made["clean_nll_sum"]) / (made["tokens"] - 1))
    texts = texts.groupby(["edit", "target", "factor", "example"])["delta"].mean()
    own, other = texts["scale", "first", 0.5], texts["scale", "control", 0.5]
    assert pair["value"] == pytest.approx(own.mean())
    assert pair["other_value"] == pytest.approx(other.mean())
    assert pair["difference"] == pytest.approx((own - other).mean())
    assert pair["low"] < pair["difference"] < pair["high"] and pair["n"] == 12
    assert pair["verdict"] == MORE
    steps = table[(table["role"] == "step") & (table["target"] == "first")]
    assert steps[["factor", "other_factor"]].to_numpy().tolist() == [[0.5, 1.0], [0.0, 0.5]]
    assert set(steps["other_edit"]) == {"scale"} and set(steps["other_target"]) == {"first"}
    grown = (texts["scale", "first", 0.0] - own).mean()
    assert steps["difference"].tolist() == pytest.approx([own.mean(), grown])
    whole = one(table, role="random", factor=1.0)
    assert (whole["value"], whole["other_edit"], whole["verdict"]) == (0, "random", LESS)
    cut = table[table["role"] == "surgery"].set_index(["edit", "other_edit"])["verdict"]
    assert cut["keep_parallel", "keep_orthogonal"] == MORE
    assert cut["keep_parallel", "mean"] == EQUAL
    assert cut["keep_parallel", "scale"] == EQUAL
    assert one(table, role="surgery", edit="mean", other_edit="scale")["other_factor"] == 0


def test_the_most_telling_pairs_are_told(curves):
    told = [sentence.removeprefix("texts, layers 2-5: ") for sentence in curves.sentences]
    starts = (
        "texts, layers 2-5, scaling the first token's value from 1 to 0: the loss grows at each st",
        "the first token's value kept harms less than the first token's value replaced by a random "
        "vector as long (0 against ",
        "the first token's value removed harms more than a control token's value removed (",
        "the first token's value cut to the part along the mean harms more than the first token's "
        "value without the part along the mean (",
        "the first token's value cut to the part along the mean and the first token's value "
        "removed are not distinguishable (",
        "the first token's value without the part along the mean harms less than the first token's "
        "value removed (",
        "the first token's value replaced by the mean and the first token's value removed are not ",
        "the first token is the only sink there; editing all sinks is editing its value alone.",
    )
    assert len(told) == len(starts)
    for sentence, start in zip(told, starts, strict=True):
        assert sentence.startswith(start)
    assert all(sentence.endswith(", 12 texts).") for sentence in told[1:-1])
    sizes = curves.comparisons.query("role == 'step' and target == 'first'")["difference"]
    assert (
        f"(it grows by {sizes.iloc[0]:.3g} at 0.5, {sizes.iloc[1]:.3g} at 0; nats per token"
        in told[0]
    )


def test_several_sinks_are_set_beside_the_first(made):
    units = made.copy()
    units.loc[(units["target"] == "sinks") & (units["factor"] != 1), "changed"] = 90
    more = units["nll_sum"] + 3 * (units["tokens"] - 1)
    units["nll_sum"] = more.where(
        (units["target"] == "sinks") & (units["factor"] == 0), units["nll_sum"]
    )
    curves = sweep_curves(units, **FEW_DRAWS)
    told = [sentence for sentence in curves.sentences if "sinks" in sentence]
    assert "scaling the sinks' values from 1 to 0: the loss grows at each step (" in told[0]
    assert told[1].startswith(
        "texts, layers 2-5: the sinks' values removed harms more than a control token's value rem"
    )
    assert told[2].startswith(
        "texts, layers 2-5: the sinks' values removed harms more than the first token's value rem"
    )
    pair = one(curves.comparisons, role="sinks", factor=0.0)
    assert (pair["target"], pair["other_target"], pair["verdict"]) == ("sinks", "first", MORE)


def test_a_step_that_falls_or_cannot_be_told_is_named(made):
    first = (made["edit"] == "scale") & (made["target"] == "first")
    at = {factor: first & (made["factor"] == factor) for factor in (0.5, 0.0)}
    units = made.copy()
    units.loc[at[0.5], "nll_sum"] += 5 * (units.loc[at[0.5], "tokens"] - 1)
    told = sweep_curves(units, **FEW_DRAWS).sentences[0]
    assert "scaling the first token's value from 1 to 0: the loss falls from 0.5 to 0 (" in told
    sign = np.where(made["example"] % 2, 1.0, -1.0)
    units["nll_sum"] = made["nll_sum"]
    for factor, rows in at.items():  # as often below as above
        base = made["clean_nll_sum"] + sign * (made["tokens"] - 1) * (2 - factor)
        units["nll_sum"] = base.where(rows, units["nll_sum"])
    told = sweep_curves(units, **FEW_DRAWS).sentences[0]
    assert "not distinguishable whether the loss grows from 1 to 0.5 and from 0.5 to 0 (" in told


def test_few_texts_get_no_verdict(made):
    few = sweep_curves(made[made["example"] < 5], **FEW_DRAWS)
    assert set(few.comparisons["verdict"]) == {FEW}
    *told, only = few.sentences
    assert only.endswith("editing all sinks is editing its value alone.")
    assert all("no verdict from fewer than 6 texts" in said for said in told) and len(told) == 7
    single = sweep_curves(made[made["example"] < 1], **FEW_DRAWS)
    assert all(", 1 text)." in said and "[" not in said for said in single.sentences[:-1])


def test_a_failed_unit_leaves_its_text_out(made):
    broken = made.copy()
    hit = (broken["target"] == "control") & (broken["factor"] == 0.5) & (broken["example"] == 4)
    first = broken.index[hit][1]
    broken.loc[first, ["nll_sum", "failed"]] = [np.nan, "the edited loss is not finite"]
    broken.loc[first, "changed"] = 0
    curves = sweep_curves(broken, **FEW_DRAWS)
    point = one(curves.points, edit="scale", target="control", factor=0.5)
    assert (point["n"], point["failed"], point["changed_values"]) == (11, 1, 36)
    rest = made[(made["example"] != 4) & (made["target"] == "control") & (made["factor"] == 0.5)]
    assert point["perplexity"] == pytest.approx(literal_point(rest)["perplexity"])
    assert curves.failed["failed"].tolist() == ["the edited loss is not finite"]
    pair = one(curves.comparisons, role="control", target="first", factor=0.5)
    assert pair["n"] == 11
    lost = made.copy()
    lost.loc[(lost["target"] == "control") & (lost["example"] == 4), "kl_sum"] = np.inf
    points = sweep_curves(lost, **FEW_DRAWS).points
    assert one(points, edit="scale", target="control", factor=1.0)["n"] == 11
    assert one(points, edit="scale", target="first", factor=1.0)["n"] == 12
    none = made.copy()
    none.loc[none["target"] == "control", "nll_sum"] = np.nan
    said = [s for s in sweep_curves(none, **FEW_DRAWS).sentences if "control" in s]
    assert len(said) == 1 and "cannot be compared: no text holds both." in said[0]


def test_the_order_of_the_rows_and_a_second_corpus_change_nothing(made, curves):
    mixed = pd.concat([made, made.assign(data="other")]).sample(frac=1, random_state=0)
    both = sweep_curves(mixed, **FEW_DRAWS)
    keys = ["edit", "target", "factor"]
    for data in ("texts", "other"):
        points = both.points[both.points["data"] == data].set_index(keys).sort_index()
        expected = curves.points.set_index(keys).sort_index()
        numbers = list(expected.columns.drop("data"))
        pd.testing.assert_frame_equal(points[numbers], expected[numbers])


def test_units_of_a_sweep_make_curves(units):
    curves = sweep_curves(units, **FEW_DRAWS)
    point = one(curves.points, edit="scale", target="first", factor=0.5)
    rows = units[(units["edit"] == "scale") & (units["target"] == "first")]
    rows = rows[rows["factor"] == 0.5]
    expected = math.exp(rows["nll_sum"].sum() / (rows["tokens"] - 1).sum())
    assert point["perplexity"] == pytest.approx(expected)


def test_tables_that_are_no_units_are_refused(made):
    for broken, message in (
        (made.drop(columns="edit"), "the table of units lacks the columns edit"),
        (made[made["edit"] == NO_OP], "holds no edit: 12 rows, all of the no_op run. Run the swe"),
        (pd.concat([made, made[5:6]]), "1 units occur twice, first example 0 of texts for scale"),
    ):
        with pytest.raises(InputError, match=message):
            sweep_curves(broken)
