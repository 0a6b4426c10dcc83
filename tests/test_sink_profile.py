"""The two calls about sinks for prompts in memory, against the parts that they are made of."""

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

import cw_lens
from cw_lens.interventions import scaled_values
from cw_lens.prompts import one_by_one
from cw_lens.studies.cone import cone_points, outputs_in_frames
from cw_lens.studies.losses import StudyText
from cw_lens.studies.norm_model import norm_points
from cw_lens.studies.readings import read_text
from cw_lens.studies.sinks import SINK_STUDIES, sink_profiles
from cw_lens.studies.sweeps import Sweep, sweep_conditions
from tests.families import prompts, wrapped

LENGTHS = (14, 9)


@pytest.fixture(scope="module")
def model():
    return wrapped("llama")


def as_texts(given):
    return [StudyText("prompts", row, text) for row, text in enumerate(one_by_one(given))]


def test_a_profile_is_that_of_each_text_alone_read_twice(model):
    given = prompts(model, LENGTHS)
    profile = cw_lens.sink_profile(model, given, layers=[1])
    texts = as_texts(given)
    readings = [read_text(model, text, SINK_STUDIES) for text in texts]
    reruns = []
    for text, reading in zip(texts, readings, strict=True):
        with scaled_values(model, 0.0, positions="first", layers=[1]):
            reruns.append(read_text(model, text, {"rerun": outputs_in_frames(reading)}))
    (expected,) = sink_profiles(readings, reruns, texts)
    assert profile.data == "prompts" and [r.tokens for r in profile.readings] == list(LENGTHS)
    for part, name in [("counts", "tokens"), ("alignment", "heads"), ("norms", "heads")]:
        assert_frame_equal(
            getattr(getattr(profile, part), name), getattr(expected, part).__dict__[name]
        )
    assert_frame_equal(profile.cone.heads, expected.cone.heads)
    assert np.isfinite(profile.cone.layers["inside_rerun"]).any()
    assert_frame_equal(profile.norm_points(1, 0), norm_points(readings, expected.norms, 1, 0))
    assert_frame_equal(profile.cone_points(0, 1), cone_points(readings, 0, 1))


def test_a_profile_takes_the_sink_layers_by_itself(model, monkeypatch):
    given = prompts(model, LENGTHS)
    monkeypatch.setattr("cw_lens.studies.sinks.sink_layers", lambda readings: (1,))
    found = cw_lens.sink_profile(model, given).cone.heads
    assert_frame_equal(found, cw_lens.sink_profile(model, given, layers=[-1]).cone.heads)
    monkeypatch.setattr("cw_lens.studies.sinks.sink_layers", lambda readings: ())
    with pytest.raises(cw_lens.InputError, match=r"no sink layer .* layers=\.\.\. \(--layers\)"):
        cw_lens.sink_profile(model, given)


def test_a_sweep_is_that_of_its_conditions(model):
    given, calls = prompts(model, LENGTHS), []
    units = cw_lens.sink_sweep(
        model,
        given,
        [0, 1],
        [1.0, 0.0],
        detector="first",
        targets=["first"],
        surgery=["mean"],
        progress=lambda *done: calls.append(done),
        batch_size=3,
    )
    conditions = sweep_conditions([1.0, 0.0], targets=["first"], surgery=["mean"])
    study = Sweep(model, as_texts(given), [0, 1], conditions, detector="first", batch_size=3)
    expected = pd.DataFrame([unit for _, found in study.run() for unit in found])[units.columns]
    assert_frame_equal(units, expected)
    assert calls == [(done, study.n_batches) for done in range(1, study.n_batches + 1)]
    assert set(cw_lens.sweep_curves(units, resamples=200).points["edit"]) == {
        "scale",
        "random",
        "mean",
    }


def test_a_layer_that_is_not_there_is_refused(model):
    given = prompts(model, LENGTHS)
    with pytest.raises(cw_lens.InputError, match="layer 7"):
        cw_lens.sink_profile(model, given, layers=[7])
    with pytest.raises(cw_lens.InputError, match="layer 7"):
        cw_lens.sink_sweep(model, given, [7])
