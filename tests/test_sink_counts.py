"""Sinks by layer and position, protected shares, and the layers that they matter in."""

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from cw_lens.errors import InputError
from cw_lens.layer import LayerAttention
from cw_lens.prompts import prompts_from_ids
from cw_lens.sinks import SINK_DETECTORS, CrowdedSinksWarning, protected_share
from cw_lens.studies.losses import StudyText
from cw_lens.studies.protection import protected_shares
from cw_lens.studies.readings import TextReading, joined, read_text
from cw_lens.studies.sink_counts import layer_sinks, sink_counts, sink_layers
from cw_lens.wrapping import wrap_model
from tests.layers import random_layer
from tests.test_alignment import FEW, planted, reading, same_tables, texts_of
from tests.tiny import tiny_llama

pytestmark = [
    pytest.mark.apart,
    pytest.mark.filterwarnings("ignore::cw_lens.sinks.CrowdedSinksWarning"),
]


def with_sinks(keys: int, sinks: list[int], weight: float) -> LayerAttention:
    """Inputs of these positions point as the first does; all but the first query give the first
    key this weight, and themselves the rest."""
    residual = torch.eye(keys, 12).double()
    residual[sinks] = residual[0] * torch.tensor([2.0]).double()
    pattern = torch.eye(keys).double() * (1 - weight)
    pattern[:, 0] = weight
    pattern[0, 0] = 1
    return planted(torch.ones(2, keys, 3), pattern.expand(2, -1, -1), residual)


def text(
    example: int, layers: list[LayerAttention], detectors: tuple[str, ...] = ("cosine",)
) -> TextReading:
    made = reading("sinks", [layer_sinks(x, detectors=detectors) for x in layers], example)
    return TextReading(made.data, example, layers[0].mask.shape[1], made.layers, made.found)


def planted_texts() -> list[TextReading]:
    """Two layers of three texts: a secondary sink at 3 in layer 2, none in layer 3."""
    return [
        text(0, [with_sinks(10, [3], 0.5), with_sinks(10, [], 0.1)]),
        text(1, [with_sinks(8, [3, 5], 0.4), with_sinks(8, [], 0.2)]),
        text(2, [with_sinks(2, [], 0.3), with_sinks(2, [], 0.0)]),
    ]


def mean_attention(weights_and_lengths: list[tuple[float, int]]) -> float:
    return float(np.mean([(1 + (n - 1) * w) / n for w, n in weights_and_lengths]))


def test_planted_sinks_are_counted():
    result = sink_counts(planted_texts(), **FEW)
    layers = result.layers
    assert layers["detector"].tolist() == ["cosine"] * 2 and layers["layer"].tolist() == [2, 3]
    assert layers["sinks"].tolist() == pytest.approx([(2 + 3 + 1) / 3, 1])
    assert layers["protected_share"].tolist() == pytest.approx([6 / 20, 3 / 20])
    assert layers["most"].tolist() == [3, 1]
    assert layers["crowded"].tolist() == [True, False]
    assert layers["sinks_n"].tolist() == [3, 3]
    assert (layers["sinks_low"][0], layers["sinks_high"][0]) == (1, 3)
    assert result.attention["layer"].tolist() == [2, 3]
    assert result.attention["first_attention"].tolist() == pytest.approx(
        [
            mean_attention([(0.5, 10), (0.4, 8), (0.3, 2)]),
            mean_attention([(0.1, 10), (0.2, 8), (0.0, 2)]),
        ]
    )
    columns = ["layer", "position", "marked", "texts", "share"]
    assert result.positions[columns].to_numpy().tolist() == [
        [2, 0, 3, 3, 1],
        [2, 3, 2, 2, 1],
        [2, 5, 1, 2, 0.5],
        [3, 0, 3, 3, 1],
    ]
    assert result.tokens is None
    top = sink_counts(planted_texts(), top=1, **FEW).positions
    assert top[columns[:2]].to_numpy().tolist() == [[2, 0], [3, 0]]


def test_sink_layers_are_found_by_their_attention():
    texts = planted_texts()
    means = sink_counts(texts, **FEW).attention["first_attention"]
    assert means[1] < 0.4 < means[0] < 0.65
    assert sink_layers(texts) == (2, 3)  # texts this short give the first token much
    assert sink_layers(texts, 0.4) == (2,)
    assert sink_layers(texts, float(means[0])) == ()
    assert sink_layers([text(0, [with_sinks(12, [], 0.2), with_sinks(12, [], 0.26)])]) == (3,)


def test_detectors_by_head_are_averaged_over_heads():
    layers = [random_layer(1, 4, 2, 9, seed=seed) for seed in range(3)]
    detectors = ("received_attention", "value_cosine", "first")
    texts = [text(n, [layer], detectors) for n, layer in enumerate(layers)]
    result = sink_counts(texts, **FEW).layers.set_index("detector")
    assert result.index.tolist() == list(detectors)
    for name in detectors:
        marked = torch.cat([SINK_DETECTORS[name](layer) for layer in layers]).float()
        assert result["sinks"][name] == pytest.approx(marked.sum().item() / 12)
        assert result["most"][name] == marked.sum(dim=-1).max()
        mask = torch.ones(3, 9, dtype=torch.bool)
        share = protected_share(marked.bool()[:, None], mask).item()
        assert result["protected_share"][name] == pytest.approx(share)
    heads = layers[0].pattern[0, :, :, 0].mean(dim=-1)
    alone = sink_counts(texts[:1], **FEW).attention
    assert alone["first_attention"][0] == pytest.approx(heads.mean().item())
    assert alone["first_attention_low"].isna().all()


def test_a_crowd_is_warned_of_once_with_its_layers():
    crowd = [with_sinks(10, [1, 2, 3], 0.5), with_sinks(10, [4], 0.5), with_sinks(10, [1, 2], 0.5)]
    with pytest.warns(CrowdedSinksWarning, match=r"cosine detector.*in layers 2 \(40%\), 4 \(30%"):
        result = sink_counts([text(0, crowd)], **FEW)
    assert result.layers["crowded"].tolist() == [True, False, True]
    uneven = [text(0, [with_sinks(10, [1, 2, 3], 0.5)]), text(1, [with_sinks(2, [], 0.5)])]
    with pytest.warns(CrowdedSinksWarning, match=r"layers 2 \(42%\)"):  # of 12 tokens, not 20
        sink_counts(uneven, **FEW)
    two_heads = [random_layer(1, 4, 2, 10), with_sinks(10, [4, 7], 0.5)]
    with pytest.warns(CrowdedSinksWarning, match=r"layers 3 \(30%\)"):
        sink_counts([text(0, two_heads)], **FEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # one sink in each of many short texts is no crowd
        short = [text(n, [with_sinks(3, [], 0.5)]) for n in range(4)]
        result = sink_counts(short, **FEW)
    assert result.layers["protected_share"].tolist() == pytest.approx([1 / 3])
    assert not result.layers["crowded"].any()


def test_layers_may_have_fewer_heads():
    def both(seed: int) -> list[LayerAttention]:
        return [random_layer(1, 4, 2, 6, seed=seed), random_layer(1, 2, 2, 6, seed=seed + 1)]

    texts = [text(n, both(n), ("first", "received_attention")) for n in range(2)]
    result = sink_counts(texts, **FEW).layers.set_index(["detector", "layer"])
    assert result["sinks"]["first"].tolist() == [1, 1]
    assert result["protected_share"]["first"].tolist() == pytest.approx([1 / 6, 1 / 6])
    marked = torch.cat([SINK_DETECTORS["received_attention"](both(n)[1]) for n in range(2)])
    assert result["sinks"]["received_attention", 3] == pytest.approx(marked.sum().item() / 4)


@pytest.fixture(scope="module")
def model():
    return wrap_model(tiny_llama())


def test_tokens_are_named_and_shares_agree_with_the_protection_of_the_faithfulness_study(model):
    rows = [[1, 5, 9, 5], [1, 7, 5], [1, 3]]
    texts = [StudyText("d", n, prompts_from_ids(model, [row])) for n, row in enumerate(rows)]
    readings = [read_text(model, x, {"sinks": layer_sinks}) for x in texts]
    result = sink_counts(readings, texts[::-1], **FEW)
    shares = protected_shares(model, texts, "cosine")
    found = result.layers.loc[result.layers["detector"] == "cosine"]
    assert dict(zip(found["layer"], found["protected_share"], strict=True)) == pytest.approx(shares)
    tokens = result.tokens
    assert tokens is not None
    marks: dict[int, float] = {}
    for row, made in zip(rows, readings, strict=True):
        for token, share in zip(row, made["sinks"]["cosine"][0].mean(axis=0), strict=True):
            marks[token] = marks.get(token, 0) + share
    here = tokens.loc[(tokens["detector"] == "cosine") & (tokens["layer"] == 0)]
    assert dict(zip(here["token_id"], here["marked"], strict=True)) == {
        token: mark for token, mark in marks.items() if mark
    }
    first = here.iloc[0]
    assert (first["token_id"], first["marked"], first["occurs"], first["share"]) == (1, 3, 3, 1)
    assert first["token"] == texts[0].prompts.tokens[0][0]
    with pytest.raises(InputError, match="d, example 2 of 2 tokens is not among the texts"):
        sink_counts(readings, texts[:2], **FEW)
    with pytest.raises(InputError, match="d, example 0 of 4 tokens is not among the texts"):
        other = StudyText("d", 0, texts[1].prompts)
        sink_counts(readings, [other, *texts[1:]], **FEW)


def test_a_token_that_comes_often_is_counted_each_time():
    ids: Tensor = torch.tensor([4, 8, 8, 8, 5, 8])
    layer = planted(torch.ones(2, 6, 3), residual=with_sinks(6, [2, 5], 0.5).residual[0], ids=ids)
    made = text(0, [layer])
    prompts = prompts_from_ids(wrap_model(tiny_llama()), [ids.tolist()])
    tokens = sink_counts([made], [StudyText("made", 0, prompts)], **FEW).tokens
    assert tokens is not None
    assert tokens[["token_id", "marked", "occurs", "share"]].to_numpy().tolist() == [
        [8, 2, 4, 0.5],
        [4, 1, 1, 1],
    ]


def test_split_readings_join_into_the_same_tables():
    texts = [
        TextReading(x.data, x.example, x["sinks"]["cosine"].shape[-1], x.layers, x.found)
        for x in texts_of("sinks", layer_sinks)
    ]
    parts = joined(texts[3:], texts[:1], texts[1:3])
    same_tables(sink_counts(texts, **FEW), sink_counts(parts, **FEW))
    same_tables(sink_counts(texts, **FEW), sink_counts(texts[::-1], **FEW))
    assert set(sink_counts(texts, **FEW).layers["detector"]) == {"cosine", "centred_cosine"}


def test_gated_layers_are_read_and_what_cannot_be_is_refused():
    assert layer_sinks(random_layer(1, gated=True))["cosine"].shape == (4, 7)
    with pytest.raises(InputError, match="unknown detector 'cosin'; there are cosine, centred"):
        layer_sinks(random_layer(1), detectors=("first", "cosin"))
    with pytest.raises(InputError, match="layer 1 holds 2 examples"):
        layer_sinks(random_layer(2))
    for function in (sink_counts, sink_layers):
        with pytest.raises(InputError, match="there are no readings of 'sinks'; read at least"):
            function([])
