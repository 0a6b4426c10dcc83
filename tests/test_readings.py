"""Readings of a corpus: one pass for all studies, parts that join into the whole, exact bytes."""

import numpy as np
import pytest
import torch

from cw_lens.errors import InputError
from cw_lens.prompts import one_by_one, prompts_from_ids
from cw_lens.runs import capture
from cw_lens.sites import UnsupportedModelError
from cw_lens.store import opened_store
from cw_lens.studies.concentration import concentration, layer_concentration
from cw_lens.studies.losses import StudyText
from cw_lens.studies.norm_model import norm_points
from cw_lens.studies.readings import (
    READING_COLUMNS,
    TextReading,
    _stacked,
    from_bytes,
    joined,
    kept_readings,
    read_text,
    read_texts,
    reading_units,
    to_bytes,
)
from cw_lens.studies.sinks import SINK_STUDIES, sink_profiles
from cw_lens.wrapping import wrap_model
from tests.families import wrapped
from tests.tiny import tiny_llama

STUDIES = {
    "patterns": lambda layer: {"last": layer.pattern[0, :, -1], "sum": layer.pattern[0].sum()},
    "outputs": lambda layer: {"norm": layer.output[0].norm(dim=-1)},
}


@pytest.fixture(scope="module")
def model():
    return wrap_model(tiny_llama())


@pytest.fixture(scope="module")
def texts(model):
    rows = [[1, 5, 9, 4], [1, 7], [1, 3, 3, 8, 20]]
    return [StudyText("d", i, prompts_from_ids(model, [row])) for i, row in enumerate(rows)]


def same(a: TextReading, b: TextReading) -> bool:
    pairs = [(a[s][n], b[s][n]) for s in a.found for n in a.found[s]]
    return a.layers == b.layers and all(
        x.dtype == y.dtype and np.array_equal(x, y, equal_nan=True) for x, y in pairs
    )


def test_every_study_reads_the_layers_of_one_pass(model, texts):
    reading = read_text(model, texts[0], STUDIES)
    layers = capture(model, texts[0].prompts).layers
    assert (reading.data, reading.example, reading.tokens) == ("d", 0, 4)
    assert reading.layers == (0, 1)
    for row, layer in enumerate(layers):
        assert np.array_equal(reading["patterns"]["last"][row], layer.pattern[0, :, -1].numpy())
        assert np.array_equal(reading["outputs"]["norm"][row], layer.output[0].norm(dim=-1))
    assert read_text(model, texts[0], STUDIES, layers=[-1]).layers == (1,)


def test_a_hybrid_is_read_in_the_layers_that_have_attention():
    model = wrapped("jamba")
    texts = [StudyText("d", i, prompts_from_ids(model, [[1, 5, 9, 4, 7][: 5 - i]])) for i in (0, 1)]
    readings = list(read_texts(model, texts, SINK_STUDIES | {"concentration": layer_concentration}))
    assert {reading.layers for reading in readings} == {(1,)}
    for text, reading in zip(texts, readings, strict=True):
        (layer,) = capture(model, text.prompts, layers=[1]).layers
        attention = layer.pattern[0, :, :, 0].double().mean(dim=-1).numpy()
        np.testing.assert_array_equal(reading["sinks"]["first_attention"], attention[None])
    (profile,) = sink_profiles(readings)
    tables = [profile.counts.layers, profile.alignment.heads, profile.norms.heads]
    tables += [profile.cone.heads, profile.cone.layers, concentration(readings).weights]
    assert [set(table["layer"].dropna()) for table in tables] == [{1}] * 6
    points = norm_points(readings, profile.norms, 1, 2)
    assert len(points) == 4 + 3
    with pytest.raises(InputError, match="layer 0"):
        norm_points(readings, profile.norms, 0, 2)
    with pytest.raises(UnsupportedModelError, match="layer 0 has no attention"):
        read_text(model, texts[0], SINK_STUDIES, layers=[0])


def test_a_study_that_was_not_read_is_named(model, texts):
    with pytest.raises(KeyError, match="'cone' was not read; there are patterns, outputs"):
        read_text(model, texts[0], STUDIES)["cone"]


def test_padding_and_several_examples_are_refused(model):
    padded = prompts_from_ids(model, [[1, 5, 9], [1, 7]])
    with pytest.raises(InputError, match="d, example 3: a reading takes one text without padding"):
        read_text(model, StudyText("d", 3, padded), STUDIES)
    rows = [StudyText("d", i, text) for i, text in enumerate(one_by_one(padded))]
    assert [reading.tokens for reading in read_texts(model, rows, STUDIES)] == [3, 2]


def test_bytes_hold_a_reading_exactly(model, texts):
    reading = read_text(model, texts[0], STUDIES)
    assert same(from_bytes("d", 0, 4, to_bytes(reading)), reading)
    assert to_bytes(reading) == to_bytes(read_text(model, texts[0], STUDIES))


def test_parts_join_into_the_whole_in_any_order(model, texts):
    whole = list(read_texts(model, texts, STUDIES))
    again = joined(list(read_texts(model, texts[2:], STUDIES)), whole[:2])
    assert [reading.example for reading in again] == [0, 1, 2]
    assert all(same(a, b) for a, b in zip(again, whole, strict=True))
    with pytest.raises(InputError, match="d, example 1 was read twice"):
        joined(whole, whole[1:2])
    other = read_text(model, StudyText("d", 9, texts[0].prompts), STUDIES, layers=[0])
    with pytest.raises(InputError, match=r"example 9 was read in layers \(0,\).*\(0, 1\)"):
        joined(whole, [other])


def test_units_taken_up_hold_the_same_readings(model, texts, tmp_path):
    whole = list(read_texts(model, texts, STUDIES))
    with opened_store(tmp_path, {}, READING_COLUMNS) as store:
        for batch, units in reading_units(model, texts[:2], STUDIES, {0}):
            store.add(batch, units)
    with opened_store(tmp_path, {}, READING_COLUMNS) as store:
        assert store.done() == {1}
        for batch, units in reading_units(model, texts, STUDIES, store.done()):
            store.add(batch, units)
        held = kept_readings(store.table())
    assert [reading.tokens for reading in held] == [4, 2, 5]
    assert all(same(a, b) for a, b in zip(held, whole, strict=True))


def test_layers_of_other_sizes_are_filled_up():
    stacked = _stacked([np.ones((2, 3)), np.ones((1, 4), dtype=np.int64)])
    assert stacked.shape == (2, 2, 4)
    expected = [[[1, 1, 1, np.nan]] * 2, [[1] * 4, [np.nan] * 4]]
    assert np.array_equal(stacked, expected, equal_nan=True)


def test_a_reading_needs_no_gradient(model, texts):
    seen = []
    read_text(
        model, texts[1], {"s": lambda layer: seen.append(torch.is_grad_enabled()) or {"x": layer.z}}
    )
    assert seen == [False, False]
