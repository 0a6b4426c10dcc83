"""The real default model in padded batches, in float32, bfloat16 and float16."""

import pytest
import torch

import cw_lens
from cw_lens.certificates import TOLERANCE
from cw_lens.metrics import METRICS
from cw_lens.models import load_model
from cw_lens.scores import layer_scores
from cw_lens.sinks import SINK_DETECTORS

TEXTS = (
    "The river froze early that winter, and the ferry was pulled ashore before the first snow.",
    "Seven times eight is",
    "Question: A baker sells 12 loaves a day. How many in a week?\nAnswer: 84",
    "Yes.",
)

pytestmark = pytest.mark.golden


@pytest.fixture(scope="module")
def one_by_one(smollm2):
    """Each text alone in float32: contributions, scores and sinks of every layer."""
    return [read(smollm2, cw_lens.tokenize(smollm2, text)) for text in TEXTS]


def read(model, given):
    functions = {name: METRICS[name] for name in METRICS if name != "gradient"}

    def reduce(layer):
        sinks = {name: detector(layer) for name, detector in SINK_DETECTORS.items()}
        return cw_lens.inter_head_contributions(layer), layer_scores(layer, functions), sinks

    return cw_lens.capture(model, given, reduce=reduce)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_of_the_default_model_reads_as_its_texts_alone(smollm2, one_by_one, side):
    given = cw_lens.tokenize(smollm2, TEXTS, padding_side=side)
    batch = read(smollm2, given)
    for row, alone in enumerate(one_by_one):
        real = given.mask[row]
        for (shares, scores, sinks), (own, own_scores, own_sinks) in zip(
            batch.layers, alone.layers, strict=True
        ):
            assert (shares[row][:, real][:, :, real] - own[0]).abs().max() < 1e-5
            assert not shares[row][:, :, ~real].any() and not shares[row][:, ~real].any()
            for name, score in scores.items():
                size = own_scores[name].abs().max().clamp_min(1.0)
                assert (score[row][:, real] - own_scores[name][0]).abs().max() < 1e-5 * size, name
                assert not score[row][:, ~real].any()
            for name, marked in sinks.items():
                assert torch.equal(marked[row][:, real], own_sinks[name][0]), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_low_precision_shares_sum_to_one(dtype, side):
    model = load_model(dtype=dtype)
    given = cw_lens.tokenize(model, TEXTS, padding_side=side)
    sums = []

    def reduce(layer):
        assert layer.output.dtype == torch.float32
        sums.append(cw_lens.inter_head_contributions(layer).sum(dim=(1, 3))[layer.query_mask])

    run = cw_lens.capture(model, given, reduce=reduce)
    assert len(sums) == 30
    assert max((total - 1).abs().max().item() for total in sums) < 1e-5
    worst = max(max(c.value_error, c.output_error) for c in run.certificates)
    assert 0 < worst < TOLERANCE[getattr(torch, dtype)]
