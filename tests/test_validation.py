"""Single ablations against literal ones, and the correlations drawn from them."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import cw_lens
from cw_lens.errors import InputError
from cw_lens.metrics import METRICS
from cw_lens.prompts import one_by_one
from cw_lens.sites import UnsupportedModelError
from cw_lens.studies.losses import StudyText
from cw_lens.studies.validation import (
    EFFECT_COLUMNS,
    Ablations,
    scored_ablations,
    validation_sentences,
    validation_table,
)
from tests.families import prompts, wrapped

FUNCTIONS = {name: METRICS[name] for name in ("attention", "contribution", "gradient")}


@pytest.fixture
def texts(llama):
    return [StudyText("tiny", row, p) for row, p in enumerate(one_by_one(prompts(llama, (5, 4))))]


def measured(ablations):
    return pd.DataFrame([unit for _, units in ablations.run() for unit in units])


def test_each_ablation_is_one_value_masked(llama, texts):
    table = measured(Ablations(llama, texts, batch_size=7))
    assert list(table.columns) == list(EFFECT_COLUMNS)
    assert len(table) == 2 * 4 * (5 + 4)
    for row in table.sample(20, random_state=1).itertuples():
        given = texts[row.example].prompts
        mask = torch.zeros(1, 4, given.ids.shape[1], dtype=torch.bool)
        mask[0, row.head, row.position] = True
        clean = cw_lens.next_token_nll(llama, given).double().sum().item()
        with cw_lens.masked_values(llama, {row.layer: mask}):
            found = cw_lens.next_token_nll(llama, given).double().sum().item()
        assert row.nll_sum == pytest.approx(found, rel=1e-6)
        assert row.clean_nll_sum == pytest.approx(clean, rel=1e-6)


def test_ablations_taken_up_again_are_the_same(llama, texts):
    def ablations():
        return Ablations(llama, texts, layers=[1], batch_size=6)

    whole = dict(ablations().run())
    assert sorted(whole) == list(range(ablations().n_batches)) == list(range(4 + 3))
    rest = dict(ablations().run({0, 2, 5}))
    assert rest == {batch: whole[batch] for batch in whole if batch not in (0, 2, 5)}


def test_scores_stand_beside_the_effects_they_are_of(llama, texts):
    table = measured(Ablations(llama, texts))
    scored = scored_ablations(llama, texts, table, FUNCTIONS, layers=[0, 1])
    assert len(scored) == len(table)
    scores = cw_lens.token_scores(llama, texts[1].prompts, FUNCTIONS)
    sinks = cw_lens.find_sinks(llama, texts[1].prompts)
    for row in scored[scored["example"] == 1].itertuples():
        place = (0, row.layer, row.head, row.position)
        assert row.contribution == pytest.approx(scores["contribution"][place].item())
        assert row.gradient == pytest.approx(scores["gradient"][place].item())
        assert row.sink == sinks[place]
        assert row.delta_nll == row.nll_sum - row.clean_nll_sum


def made_up(effect, score):
    n = len(effect)
    return pd.DataFrame(
        {
            "data": "made up",
            "example": 0,
            "layer": np.arange(n) // (n // 2),
            "head": 0,
            "position": np.arange(n) % (n // 2),
            "delta_nll": effect,
            "sink": np.arange(n) % 10 == 0,
            "mine": score,
        }
    )


def test_correlations_are_spearmans_overall_and_within_layers():
    g = np.random.default_rng(0)
    effect = g.normal(size=200)
    effect[100:] *= 20  # the second layer matters more, and the score knows only that
    score = np.abs(effect) * 0.0 + np.repeat([1.0, 2.0], 100) + g.normal(size=200) * 1e-3
    table = validation_table(made_up(effect, score), ["mine"])
    row = table.query("among == 'all' and effect == 'size'").iloc[0]
    expected = stats.spearmanr(score, np.abs(effect)).statistic
    assert row.rho == pytest.approx(expected)
    assert row.low < row.rho < row.high and row.n == 200
    own = [
        stats.spearmanr(score[s], np.abs(effect)[s]).statistic for s in np.split(np.arange(200), 2)
    ]
    assert row.within_layers == pytest.approx(np.mean(own))
    assert row.rho > 0.5 > abs(row.within_layers) + 0.2
    harm = table.query("among == 'all' and effect == 'harm'").iloc[0]
    assert harm.rho == pytest.approx(stats.spearmanr(score, effect).statistic)
    fewer = table.query("among == 'without sinks' and effect == 'size'").iloc[0]
    kept = np.arange(200) % 10 != 0
    assert fewer.n == 180
    assert fewer.rho == pytest.approx(stats.spearmanr(score[kept], np.abs(effect)[kept]).statistic)
    sentence, caveat = validation_sentences(table)
    assert "share texts and layers" in caveat
    assert sentence.startswith(f"mine: rank correlation {expected:.2f} [")


def test_ablations_that_failed_are_left_out():
    effect = np.arange(20.0)
    effect[3] = np.nan
    table = validation_table(made_up(effect, np.arange(20.0)), ["mine"])
    row = table.query("among == 'all' and effect == 'harm'").iloc[0]
    assert row.n == 19 and row.rho == pytest.approx(1.0)


def test_models_without_a_next_token_are_refused_before_anything_runs():
    model = wrapped("bert")
    with pytest.raises(UnsupportedModelError, match="Use a decoder"):
        Ablations(model, [StudyText("tiny", 0, prompts(model, (5,)))])


def test_a_value_without_any_weight_changes_nothing_and_is_no_error(llama, texts):
    with torch.no_grad():
        llama.original_model.model.layers[0].self_attn.q_proj.weight.mul_(200)
    table = measured(Ablations(llama, texts, layers=[0]))
    still = table["nll_sum"].sub(table["clean_nll_sum"]).abs() < 1e-4
    assert 0 < still.sum() < len(table)


def test_no_texts_or_batches_of_nothing_are_refused(llama, texts):
    with pytest.raises(InputError, match="no texts: give at least one"):
        Ablations(llama, [])
    with pytest.raises(InputError, match="a batch size of 0"):
        Ablations(llama, texts, batch_size=0)
    with pytest.raises(InputError, match="layer 7 does not exist"):
        Ablations(llama, texts, layers=[7])
