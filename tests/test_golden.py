"""SmolLM2-135M against an independent, slow, float64 computation (SPEC 7)."""

from contextlib import nullcontext

import pytest
import torch

import cw_lens
from cw_lens.metrics import METRICS
from cw_lens.prompts import prompts_from_ids
from tests.conftest import ON_FOUR

pytestmark = pytest.mark.golden

SCORED = [name for name in METRICS if name not in ("gradient", "random", "output_distance")]


def assert_golden(found: torch.Tensor, expected: object) -> None:
    """Within 1e-4 relative or 1e-5 absolute."""
    expected = torch.tensor(expected, dtype=torch.float64)
    miss = (found.double() - expected).abs()
    assert found.shape == expected.shape
    assert ((miss <= 1e-5) | (miss <= 1e-4 * expected.abs())).all(), miss.max().item()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_prompts_agree(smollm2, golden, number):
    prompt = golden["prompts"][number]
    prompts = cw_lens.tokenize(smollm2, prompt["text"])
    assert prompts.ids[0].tolist() == prompt["ids"]
    assert_golden(cw_lens.next_token_nll(smollm2, prompts).sum(), prompt["nll_sum"])
    run = cw_lens.capture(smollm2, prompts)
    scores = cw_lens.token_scores(smollm2, prompts, SCORED)
    sinks = cw_lens.find_sinks(smollm2, prompts)
    centred = cw_lens.find_sinks(smollm2, prompts, "centred_cosine")
    assert len(prompt["layers"]) == len(run.layers) == 30
    for expected in prompt["layers"]:
        index = expected["layer"]
        layer = run.layers[index]
        inter = cw_lens.inter_head_contributions(layer)[0]
        assert_golden(layer.output[0, -1].norm(), expected["output_norm_last"])
        first = expected["inter_sum_over_heads_first_key_mean_over_queries"]
        assert_golden(inter.sum(dim=0)[:, 0].mean(), first)
        assert sinks[0, index, 0].nonzero().flatten().tolist() == expected["sinks"]
        assert centred[0, index, 0].nonzero().flatten().tolist() == expected["sinks_centred"]
        for name, values in expected["token_scores_head0"].items():
            assert_golden(scores[name][0, index, 0], values)
        if "inter_last_query" in expected:
            intra = cw_lens.intra_head_contributions(layer)[0]
            factors = cw_lens.decompose(layer)
            assert_golden(inter[:, -1], expected["inter_last_query"])
            assert_golden(intra[:, -1], expected["intra_last_query"])
            assert_golden(factors.cosine[0, 0, -1], expected["cosine_last_query_head0"])
            norm = expected["relative_norm_last_query_head0"]
            assert_golden(factors.relative_norm[0, 0, -1], norm)


def test_the_default_loads_as_the_line_has_it(smollm2):
    expected = "TransformerBridge" if ON_FOUR else "HookedTransformer"
    assert type(smollm2).__name__ == expected


@pytest.fixture(scope="module")
def gsm8k(smollm2, golden):
    """The texts of the golden faithfulness numbers, each a batch of one."""
    return [prompts_from_ids(smollm2, [ids]) for ids in golden["faithfulness"]["ids"]]


def summed_losses(model, texts, context) -> list[float]:
    """Loss of each text inside the context made for it, in nats."""
    sums = []
    for prompts in texts:
        with context(prompts):
            sums.append(cw_lens.next_token_nll(model, prompts).double().sum().item())
    return sums


def assert_losses(found: list[float], expected: list[float]) -> None:
    """Each within 1e-3 relative."""
    assert found == pytest.approx(expected, rel=1e-3, abs=0)


def test_clean_losses_agree(smollm2, golden, gsm8k):
    found = summed_losses(smollm2, gsm8k, lambda _: nullcontext())
    assert_losses(found, golden["faithfulness"]["clean_nll"])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_masked_losses_agree(smollm2, golden, gsm8k, number):
    row = golden["faithfulness"]["rows"][number]
    options = {name: row[name] for name in ("remove", "fraction")}

    def masked(prompts):
        plan = cw_lens.removal_plan(smollm2, prompts, row["metric"], **options)
        return cw_lens.masked_values(smollm2, plan)

    assert_losses(summed_losses(smollm2, gsm8k, masked), row["nll"])


@pytest.mark.slow
def test_losses_without_protected_sinks_agree(smollm2, golden, gsm8k):
    def masked(prompts):
        plan = cw_lens.removal_plan(smollm2, prompts, "attention", fraction=0.05, protected="none")
        return cw_lens.masked_values(smollm2, plan)

    expected = golden["faithfulness"]["unprotected_attention_highest_0.05"]
    assert_losses(summed_losses(smollm2, gsm8k, masked), expected)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
def test_losses_with_a_scaled_sink_agree(smollm2, golden, gsm8k, number):
    row = golden["faithfulness"]["sink_value_scale"][number]
    first, last = row["layers"]

    def scaled(prompts):
        where = torch.zeros(1, 9, prompts.ids.shape[1], dtype=torch.bool)
        where[:, :, 0] = True
        layers = dict.fromkeys(range(first, last + 1), where)
        return cw_lens.scaled_values(smollm2, float(row["scale"]), layers)

    assert_losses(summed_losses(smollm2, gsm8k, scaled), row["nll"])
