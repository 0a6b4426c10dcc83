"""The faithfulness study: its units against literal runs, and that its order changes nothing."""

import math
from contextlib import contextmanager

import pandas as pd
import pytest
import torch

import cw_lens
from cw_lens import backend
from cw_lens.errors import InputError
from cw_lens.interventions import OnlinePlan, RankedMasks
from cw_lens.metrics import METRICS
from cw_lens.prompts import one_by_one
from cw_lens.removal import Removal
from cw_lens.sinks import CrowdedSinksWarning
from cw_lens.sites import UnsupportedModelError
from cw_lens.studies import faithfulness
from cw_lens.studies.conditions import removals_of
from cw_lens.studies.curves import NO_OP
from cw_lens.studies.faithfulness import (
    UNIT_COLUMNS,
    Study,
)
from cw_lens.studies.losses import StudyText
from cw_lens.studies.protection import protected_shares
from tests.families import prompts, wrapped

METRICS_HERE = ("attention", "contribution", "gradient")
FUNCTIONS = {name: METRICS[name] for name in METRICS_HERE}


def study(model, **options):
    texts = [StudyText("tiny", row, p) for row, p in enumerate(one_by_one(prompts(model, (9, 6))))]
    removals = removals_of(FUNCTIONS, [0.2, 0.6], granularity=["layer", "global"])
    return Study(model, texts, removals, FUNCTIONS, batch_size=4, **options)


def logp(model, given):
    with torch.no_grad():
        return backend.forward(model, given)[0].double().log_softmax(dim=-1)


def test_units_are_what_literal_runs_give(llama):
    """Each unit against one forward pass of one text under its plan, in float64 sums."""
    units = cw_lens.faithfulness(
        llama,
        prompts(llama, (9, 6)),
        METRICS_HERE,
        fractions=[0.2, 0.6],
        granularity=["layer", "head", "global"],
        protected=["cosine", "none"],
    )
    assert list(units.columns) == list(UNIT_COLUMNS)
    conditions = 2 * 3 * (3 + 3) * 2 * 2
    assert len(units) == 2 * (1 + conditions)
    texts = one_by_one(prompts(llama, (9, 6)))
    for unit in units[units["metric"] != NO_OP].sample(60, random_state=0).to_dict("records"):
        text = texts[unit["example"]]
        length = text.ids.shape[1]
        assert unit["tokens"] == length
        clean = logp(llama, text)
        metric = unit["metric"]
        if metric == "random":
            metric = {"r": lambda layer, s=unit["seed"]: cw_lens.metrics.random(layer, s)}
        plan = cw_lens.removal_plan(
            llama,
            text,
            metric,
            **{name: unit[name] for name in ("remove", "fraction", "granularity")},
            **{name: unit[name] for name in ("ranking", "protected")},
        )
        with cw_lens.masked_values(llama, plan):
            found = logp(llama, text)
        ids = text.ids[0]
        nll = -sum(found[i, ids[i + 1]].item() for i in range(length - 1))
        assert unit["nll_sum"] == pytest.approx(nll, rel=1e-5)
        nll = -sum(clean[i, ids[i + 1]].item() for i in range(length - 1))
        assert unit["clean_nll_sum"] == pytest.approx(nll, rel=1e-5)
        kl = (clean.exp() * (clean - found))[:-1].sum().item()
        assert unit["kl_sum"] == pytest.approx(kl, rel=1e-3, abs=1e-5)
        same = clean.argmax(dim=-1) == found.argmax(dim=-1)
        assert unit["top1_agreed"] == int(same[:-1].sum())


def test_the_no_op_run_is_the_clean_run_bit_for_bit(llama):
    units = cw_lens.faithfulness(llama, prompts(llama, (9, 6)), ["attention"], fractions=[0.5])
    idle = units[units["metric"] == NO_OP]
    assert len(idle) == 2
    assert (idle["nll_sum"] == idle["clean_nll_sum"]).all()
    assert (idle["kl_sum"] == 0).all() and (idle["removed"] == 0).all()
    assert (idle["top1_agreed"] == idle["tokens"] - 1).all()
    others = units[units["metric"] != NO_OP]
    assert (others["nll_sum"] != others["clean_nll_sum"]).all()


def test_the_random_control_is_always_there_and_gradient_ranks_clean(llama):
    units = cw_lens.faithfulness(llama, prompts(llama, (9,)), ["gradient"], fractions=[0.5])
    held = units[units["metric"] != NO_OP].groupby("metric")
    assert held.groups.keys() == {"gradient", "random"}
    assert held.get_group("gradient")["ranking"].unique().tolist() == ["clean"]
    random = held.get_group("random")
    assert random["ranking"].unique().tolist() == ["online"]
    assert sorted(random["seed"].unique()) == [0, 1, 2]
    assert random.groupby("remove")["nll_sum"].nunique().min() == 3


def test_a_global_unit_counts_what_it_removed(llama):
    units = cw_lens.faithfulness(
        llama, prompts(llama, (9,)), ["attention"], fractions=[0.3], granularity=["global"]
    )
    sinks = int(cw_lens.find_sinks(llama, prompts(llama, (9,))).sum())
    count = int(0.3 * (2 * 4 * 9 - sinks) + 1e-9)
    assert set(units.loc[units["metric"] != NO_OP, "removed"]) == {count}


def test_a_study_taken_up_again_gives_what_it_would_have_given(llama):
    """Whatever was done before, the batches that are left come out bit for bit."""
    whole = dict(study(llama).run())
    total = study(llama).n_batches
    assert sorted(whole) == list(range(total))
    for done in (set(), {0, 3, 5}, set(range(total - 1)), set(range(0, total, 2))):
        rest = dict(study(llama).run(done))
        assert set(rest) == set(whole) - done
        assert all(rest[batch] == whole[batch] for batch in rest)
    assert list(study(llama).run(range(total))) == []


def test_batches_of_conditions_equal_one_at_a_time(llama):
    options = {"fractions": [0.2, 0.6], "granularity": ["layer", "head", "global"]}
    given = prompts(llama, (9,))
    one, many = (
        cw_lens.faithfulness(llama, given, METRICS_HERE, batch_size=size, **options)
        for size in (1, 7)
    )
    keys = ["metric", "remove", "granularity", "ranking", "fraction", "seed"]
    both = one.merge(many, on=keys, suffixes=("_one", "_many"), validate="one_to_one")
    assert len(both) == len(one) == len(many)
    assert (both["removed_one"] == both["removed_many"]).all()
    torch.testing.assert_close(
        torch.tensor(both["nll_sum_one"]), torch.tensor(both["nll_sum_many"]), rtol=1e-5, atol=0
    )


def test_a_loss_that_is_nan_is_kept_as_such(llama):
    with torch.no_grad():
        llama.original_model.lm_head.weight[5] = torch.nan  # every prediction is NaN
    units = cw_lens.faithfulness(llama, prompts(llama, (5,)), ["attention"], fractions=[0.5])
    assert units["nll_sum"].isna().all()
    curves = cw_lens.removal_curves(units)
    assert len(curves.failed) == len(units) - 1
    assert curves.points["n"].eq(0).all() and curves.points["perplexity"].isna().all()


@pytest.mark.parametrize("ranking", ["online", "clean"])
def test_activations_that_turn_nan_cost_their_own_units_alone(llama, ranking):
    """Where much is removed the activations become NaN: those units are NaN, the rest goes on."""
    given = prompts(llama, (9,))
    point = llama.hook_dict["blocks.0.attn.hook_z"]
    sizes = []
    with backend.hooked([(point, lambda z: sizes.append(z.abs().sum()))]), torch.no_grad():
        backend.forward(llama, given)

    def explode(z):
        lost = z.abs().sum(dim=(1, 2, 3) if z.ndim == 4 else (1, 2)) < 0.5 * sizes[0]
        return torch.where(lost.reshape(-1, *[1] * (z.ndim - 1)), torch.nan, z)

    original = faithfulness.masked_values

    @contextmanager
    def exploding(model, plan):
        with original(model, plan), backend.hooked([(point, explode)]):
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faithfulness, "masked_values", exploding)
        units = cw_lens.faithfulness(
            llama, given, ["contribution"], fractions=[0.1, 0.95], ranking=ranking
        )
    lost = units["nll_sum"].isna()
    assert 0 < lost.sum() < len(units)
    assert units.loc[lost, "fraction"].eq(0.95).all()


def test_the_no_op_run_has_its_hooks_in_place(llama, monkeypatch):
    """Also where everything ranks clean, whose masks of nothing would write nothing."""
    plans = []
    original = faithfulness.masked_values
    monkeypatch.setattr(
        faithfulness, "masked_values", lambda m, plan: plans.append(plan) or original(m, plan)
    )
    given = prompts(llama, (5,))
    cw_lens.faithfulness(llama, given, ["gradient"], fractions=[0.5], ranking="clean")
    assert isinstance(plans[0], OnlinePlan) and len(plans[0].layers) == 2
    assert all(isinstance(plan, RankedMasks) for plan in plans[1:])


def test_the_names_of_the_controls_are_taken(llama):
    for name in ("random", "no_op"):
        own = {name: lambda layer: layer.pattern}
        with pytest.raises(InputError, match=f"{name} is the name of a control; give your metric"):
            cw_lens.faithfulness(llama, prompts(llama, (5,)), own)
    units = cw_lens.faithfulness(
        llama, prompts(llama, (5,)), {"mine": METRICS["gradient"]}, fractions=[0.5]
    )
    assert units.loc[units["metric"] == "mine", "ranking"].unique().tolist() == ["clean"]


def test_what_is_protected_is_told_and_warned_of(llama):
    texts = [StudyText("tiny", row, p) for row, p in enumerate(one_by_one(prompts(llama, (9, 6))))]
    with pytest.warns(CrowdedSinksWarning, match="the cosine detector marks more than 25%"):
        shares = protected_shares(llama, texts, "cosine")
    sinks = [cw_lens.find_sinks(llama, text.prompts) for text in texts]
    for layer, share in shares.items():
        marked = sum(int(found[:, layer].sum()) for found in sinks)
        assert share == pytest.approx(marked / (4 * (9 + 6)))


def test_progress_counts_the_batches(llama):
    seen = []
    cw_lens.faithfulness(
        llama,
        prompts(llama, (5, 5)),
        ["attention"],
        fractions=[0.5],
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(i, 4) for i in range(1, 5)]


def test_a_metric_of_ones_own_is_studied_like_any_other(llama):
    own = {"mine": lambda layer: layer.pattern.sqrt()}
    units = cw_lens.faithfulness(llama, prompts(llama, (9,)), own, fractions=[0.2])
    assert set(units["metric"]) == {NO_OP, "mine", "random"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fractions": []}, r"the fractions are \[\]; give at least one above 0"),
        ({"fractions": [0.0]}, r"the fractions are \[0.0\]; .* one that removes nothing are made"),
        ({"fractions": [1.2]}, "the fractions are"),
        ({"seeds": 2}, "2 seeds of the random control are too few; use 3 or more."),
        ({"batch_size": 0}, "a batch size of 0: give at least one text"),
        ({"metrics": ["magic"]}, "unknown metric 'magic'"),
        ({"protected": ["bos"]}, "unknown protected 'bos'"),
        ({"space": "outer"}, "unknown space"),
        ({"ranking": "onlin"}, "unknown ranking 'onlin'; there are online, clean."),
        ({"remove": []}, "remove is empty; name at least one of highest, lowest."),
        ({"granularity": []}, "granularity is empty; name at least one of layer, head, global."),
        ({"protected": []}, "protected is empty; name at least one of cosine, .*, none."),
        ({"metrics": {"mine": lambda layer: None}}, "metric 'mine' returned a NoneType"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused(llama, options, message):
    with pytest.raises(InputError, match=message):
        cw_lens.faithfulness(llama, prompts(llama, (5,)), **options)


def test_texts_without_a_loss_are_refused(llama):
    with pytest.raises(InputError, match="prompts, example 1: one token alone has no loss"):
        cw_lens.faithfulness(llama, prompts(llama, (5, 1)), ["attention"])
    with pytest.raises(InputError, match="no texts: give at least one"):
        Study(llama, [], [Removal("attention", "highest", 0.1)], FUNCTIONS)


def test_models_without_a_next_token_are_refused():
    model = wrapped("bert")
    with pytest.raises(UnsupportedModelError, match="removing .* no loss to show in. Use a dec"):
        cw_lens.faithfulness(model, prompts(model, (5,)), ["attention"], ranking="clean")


def test_curves_come_from_units(llama):
    units = cw_lens.faithfulness(llama, prompts(llama, (9, 6, 8)), fractions=[0.3])
    point = cw_lens.removal_curves(units).points.query(
        "metric == 'contribution' and remove == 'highest'"
    )
    own = units.query("metric == 'contribution' and remove == 'highest'")
    assert isinstance(own, pd.DataFrame)
    expected = math.exp(own["nll_sum"].sum() / (own["tokens"] - 1).sum())
    assert point["perplexity"].item() == pytest.approx(expected)
