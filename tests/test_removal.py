"""Removal plans: which pairs are removed, in what order, and what that does to a run."""

import pytest
import torch
from hypothesis import given as given_
from hypothesis import settings
from hypothesis import strategies as st

import cw_lens
from cw_lens import backend
from cw_lens.edits import InterventionError
from cw_lens.errors import InputError
from cw_lens.interventions import OnlinePlan
from cw_lens.metrics import METRICS, random
from cw_lens.prompts import one_by_one, repeated
from cw_lens.removal import (
    Removal,
    clean_masks,
    clean_ranking,
    lost_pairs,
    online_plan,
    removal_plan,
)
from cw_lens.sites import UnsupportedModelError, attention_layers
from tests.conftest import ON_FOUR
from tests.families import NOT_ON_THREE, prompts, wrapped


def held(*names):
    """Those that the installed transformer-lens can hold."""
    return [name for name in names if ON_FOUR or name not in NOT_ON_THREE]


def run(model, given):
    with torch.no_grad():
        return backend.forward(model, given)


def removed(model, given, **options):
    with cw_lens.masked_values(model, removal_plan(model, given, **options)):
        return run(model, given)


def literal(score, eligible, remove, fraction):
    """The pairs of one group in SPEC's words: sorted by score, ties by index, the first k."""
    pairs = [i for i in range(len(score)) if eligible[i]]
    pairs.sort(key=lambda i: (-score[i] if remove == "highest" else score[i], i))
    return set(pairs[: int(fraction * len(pairs) + 1e-9)])


@settings(max_examples=300)
@given_(
    st.lists(st.integers(0, 4), min_size=12, max_size=12),  # many ties
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.sampled_from(["highest", "lowest"]),
    st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]),
    st.sampled_from(["layer", "head", "global"]),
)
def test_the_pairs_removed_are_the_first_by_score_then_by_head_and_key(
    scores, eligible, remove, fraction, granularity
):
    score = torch.tensor(scores, dtype=torch.float32).reshape(2, 2, 3)  # layer head key
    mask = torch.tensor(eligible).reshape(2, 2, 3)
    removal = Removal("m", remove, fraction, granularity, ranking="clean")
    found = lost_pairs(score, mask, removal)
    size = {"head": 3, "layer": 6, "global": 12}[granularity]
    expected = set()
    for start in range(0, 12, size):
        part = slice(start, start + size)
        expected |= {start + i for i in literal(scores[part], eligible[part], remove, fraction)}
    assert set(found.flatten().nonzero().flatten().tolist()) == expected


def test_counts_do_not_suffer_from_floating_point():
    score, real = torch.arange(100.0)[None], torch.ones(1, 100, dtype=torch.bool)
    assert 0.29 * 100 < 29  # in floating point
    found = lost_pairs(score, real, Removal("m", "highest", 0.29))
    assert found.sum() == 29 and not found[0, :71].any()
    assert lost_pairs(score[:, :10], real[:, :10], Removal("m", "lowest", 0.29)).sum() == 2


@pytest.mark.parametrize("ranking", ["online", "clean"])
@pytest.mark.parametrize("name", held("llama", "gptj", "gemma2", "qwen3_5"))
def test_a_fraction_of_0_is_the_clean_run_bit_for_bit(name, ranking):
    model = wrapped(name)
    given = prompts(model, (7, 11))
    assert torch.equal(removed(model, given, fraction=0.0, ranking=ranking), run(model, given))


@pytest.mark.parametrize("name", ["llama", "gptj", "gemma2"])
@pytest.mark.parametrize("metric", ["contribution", "stream_contribution", "random"])
def test_online_at_the_first_layer_is_clean_there_and_behind_it_is_not(name, metric):
    model = wrapped(name)
    given = prompts(model, (9, 9))
    first, *later = attention_layers(model)
    options = {"metric": metric, "fraction": 0.4}
    online, clean = (
        removed(model, given, **options, layers=[first], ranking=ranking)
        for ranking in ("online", "clean")
    )
    torch.testing.assert_close(online, clean, rtol=0, atol=0)
    assert not torch.equal(online, run(model, given))
    if metric != "random":  # which ranks by no activation
        masks = {"online": {}, "clean": removal_plan(model, given, **options, ranking="clean")}
        plan = removal_plan(model, given, **options)
        choose = plan.choose

        def noted(layer):
            masks["online"][layer.index] = choose(layer)
            return masks["online"][layer.index]

        with cw_lens.masked_values(model, OnlinePlan(plan.prompts, plan.layers, noted, plan.space)):
            run(model, given)
        assert torch.equal(masks["online"][first], masks["clean"][first])
        assert any(not torch.equal(masks["online"][i], masks["clean"][i]) for i in later)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("ranking", ["online", "clean"])
@pytest.mark.parametrize("granularity", ["layer", "head", "global"])
def test_a_padded_batch_loses_what_each_text_would_alone(side, ranking, granularity, llama):
    if granularity == "global" and ranking == "online":
        pytest.skip("global plans rank from a clean pass")
    given = prompts(llama, (6, 12, 9), side)
    for remove in ("highest", "lowest"):
        options = {"remove": remove, "fraction": 0.3, "ranking": ranking}
        options["granularity"] = granularity
        together = removed(llama, given, **options)
        for row, alone in enumerate(one_by_one(given)):
            expected = removed(llama, alone, **options)[0]
            torch.testing.assert_close(together[row][given.mask[row]], expected, rtol=0, atol=1e-4)


def test_rows_of_a_batch_may_lose_different_things(llama):
    """Batched equals one by one, whatever metric, direction, fraction and protection a row has."""
    alone = prompts(llama, (12,))
    removals = [
        Removal("contribution", "highest", 0.2),
        Removal("contribution", "lowest", 0.6, granularity="head"),
        Removal("attention", "highest", 0.4, protected="none"),
        Removal("random", "highest", 0.4, seed=1),
        Removal("random", "highest", 0.4, seed=2),
        Removal("mine", "lowest", 0.5, protected="value_cosine"),
    ]
    functions = {**METRICS, "mine": lambda layer: METRICS["value_weighted"](layer) ** 2}
    batch = repeated(alone, len(removals))
    plan = online_plan(batch, removals, functions, [0, 1])
    with cw_lens.masked_values(llama, plan):
        together = run(llama, batch)
    for row, removal in enumerate(removals):
        with cw_lens.masked_values(llama, online_plan(alone, [removal], functions, [0, 1])):
            torch.testing.assert_close(together[row], run(llama, alone)[0], rtol=0, atol=1e-5)
    assert not torch.allclose(together[3], together[4], atol=1e-3)


def test_a_global_plan_removes_exactly_its_count_and_protects_sinks(llama):
    given = prompts(llama, (12, 5))
    sinks = cw_lens.find_sinks(llama, given)
    for protected in ("cosine", "none"):
        masks = removal_plan(
            llama,
            given,
            "stream_contribution",
            fraction=0.37,
            granularity="global",
            ranking="clean",
            protected=protected,
        )
        lost = torch.stack([masks[0], masks[1]], dim=1)
        for row, length in enumerate((12, 5)):
            guarded = int(sinks[row].sum()) if protected == "cosine" else 0
            assert guarded > 0 or protected == "none"
            assert lost[row].sum() == int(0.37 * (2 * 4 * length - guarded) + 1e-9)
            assert not lost[row][..., length:].any()
        assert not (lost & sinks).any() or protected == "none"


def test_a_plan_takes_a_metric_of_ones_own(llama):
    given = prompts(llama, (9,))
    own = {"mine": lambda layer: layer.pattern.pow(2)}
    plan = removal_plan(llama, given, own, fraction=0.3, ranking="clean")
    squared = cw_lens.token_scores(llama, given, own)["mine"][0, 0]
    kept = squared[~plan[0][0]]
    sinks = cw_lens.find_sinks(llama, given)[0, 0]
    assert squared[plan[0][0]].min() >= kept[~sinks[~plan[0][0]]].max()


def test_masking_a_head_leaves_the_z_of_the_others_as_it_is(llama):
    given = prompts(llama, (9,))
    site = llama.hook_dict["blocks.0.attn.hook_z"]
    seen = []
    mask = torch.zeros(1, 4, 9, dtype=torch.bool)
    mask[0, 2, 1:5] = True
    clean = []
    with backend.hooked([(site, lambda z: clean.append(z.clone()))]):
        run(llama, given)
    with cw_lens.masked_values(llama, {0: mask}), backend.hooked([(site, seen.append)]):
        run(llama, given)
    before, after = (z[0].reshape(1, 9, 4, -1) for z in (clean, seen))
    same = [torch.equal(before[:, :, head], after[:, :, head]) for head in range(4)]
    assert same == [True, True, False, True]


def test_masks_through_the_pattern_and_through_z_agree(llama):
    """Where a write to hook_pattern reaches the output, it does what ours does at hook_z."""
    given = prompts(llama, (9, 9))
    mask = torch.rand(2, 4, 9, generator=torch.Generator().manual_seed(0)) < 0.3
    with cw_lens.masked_values(llama, {0: mask, 1: mask}):
        ours = run(llama, given)

    def dropped(pattern):
        return pattern.masked_fill(mask[:, :, None], 0.0)

    points = [llama.hook_dict[f"blocks.{layer}.attn.hook_pattern"] for layer in (0, 1)]
    with backend.hooked([(point, dropped) for point in points]):
        theirs = run(llama, given)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5)
    assert not torch.allclose(ours, run(llama, given), atol=1e-2)


def test_the_random_control_draws_pairs_without_regard_to_their_place(llama):
    """Early and late keys, few queries or many: each pair is as likely as any other."""
    given = prompts(llama, (32,))
    layer = cw_lens.capture(llama, given, layers=[0]).layers[0]
    counts = torch.zeros(32)
    for seed in range(300):
        scores = cw_lens.scores.layer_scores(layer, {"r": lambda x, s=seed: random(x, s)})["r"]
        counts += lost_pairs(scores[0], scores[0] >= 0, Removal("r", "highest", 0.25)).sum(dim=0)
    expected = 300 * 4 * 0.25
    assert (counts - expected).abs().max() < 5 * (expected * 0.75) ** 0.5


def test_a_clean_ranking_of_one_text_serves_many_removals(llama):
    given = prompts(llama, (9,))
    removals = [Removal("attention", "highest", f, ranking="clean") for f in (0.1, 0.5)]
    ranking = clean_ranking(llama, given, removals, METRICS, layers=[0, 1])
    masks = clean_masks(ranking, removals)
    for row, fraction in enumerate((0.1, 0.5)):
        alone = removal_plan(llama, given, "attention", fraction=fraction, ranking="clean")
        assert all(torch.equal(masks[layer][row], alone[layer][0]) for layer in (0, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remove": "most"}, "unknown remove 'most'; there are highest, lowest."),
        ({"granularity": "token"}, "unknown granularity 'token'; there are layer, head, global."),
        ({"ranking": "later"}, "unknown ranking 'later'; there are online, clean."),
        ({"protected": "bos"}, "unknown protected 'bos'; there are cosine, .*, none."),
        ({"fraction": 1.5}, "the fraction is 1.5; it must be from 0 to 1."),
        ({"fraction": float("nan")}, "the fraction is nan"),
        ({"granularity": "global"}, 'one threshold over all layers.* Use ranking="clean"'),
        ({"metric": "gradient"}, 'gradients, come from a clean pass. Use ranking="clean"'),
        ({"metric": "magic"}, "unknown metric 'magic'"),
        ({"metric": {"a": abs, "b": abs}}, "a plan ranks by one metric; 2 were given."),
        ({"layers": [5]}, "layer 5 does not exist"),
        ({"space": "outer"}, "unknown space 'outer'"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(llama, options, message):
    with pytest.raises(InputError, match=message):
        removal_plan(llama, prompts(llama, (5,)), **options)


def test_an_online_plan_is_for_its_own_prompts(llama):
    plan = removal_plan(llama, prompts(llama, (5, 4), "right"))
    for other in (prompts(llama, (6,)), prompts(llama, (5, 4), "left")):
        with pytest.raises(
            InputError, match=r"plan is for prompts of shape \(2, 5\).*given other token ids"
        ):
            with cw_lens.masked_values(llama, plan):
                run(llama, other)
    assert not llama._forward_pre_hooks


@pytest.mark.parametrize("granularity", ["layer", "head", "global"])
def test_a_plan_may_remove_what_has_no_weight_and_a_mask_may_not(llama, granularity):
    """Attention that underflows to 0: for a ranking that is a measured nothing, no mistake."""
    with torch.no_grad():
        for block in llama.original_model.model.layers:
            block.self_attn.q_proj.weight.mul_(40)
    given = prompts(llama, (12,))
    plan = removal_plan(
        llama, given, remove="lowest", fraction=0.05, ranking="clean", granularity=granularity
    )
    with cw_lens.masked_values(llama, plan):
        run(llama, given)
    layer = cw_lens.capture(llama, given, layers=[0]).layers[0]
    unseen = (layer.pattern.sum(dim=2) == 0).nonzero()[0]
    mask = torch.zeros(1, 4, 12, dtype=torch.bool)
    mask[tuple(unseen)] = True
    with pytest.raises(InterventionError, match="no value marked in example 0 has any weight"):
        with cw_lens.masked_values(llama, {0: mask}):
            run(llama, given)


def test_gradients_do_not_rank_online_under_any_name(llama):
    with pytest.raises(InputError, match='gradients come from a clean pass. Use ranking="clean"'):
        removal_plan(llama, prompts(llama, (5,)), {"mine": METRICS["gradient"]})


@pytest.mark.parametrize("name", held("bert", "roberta"))
def test_where_values_are_written_before_the_pattern_online_plans_are_refused(name):
    model = wrapped(name)
    given = prompts(model, (7,))
    with pytest.raises(UnsupportedModelError, match='layer 0: .* ranked in .*Use ranking="clean"'):
        removed(model, given)
    assert not torch.equal(removed(model, given, ranking="clean"), run(model, given))
