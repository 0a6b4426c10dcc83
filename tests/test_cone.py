"""The cone of the values: literal, planted, second passes, split corpora, and what has none."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from cw_lens.errors import InputError
from cw_lens.interventions import scaled_values
from cw_lens.layer import LayerAttention
from cw_lens.prompts import prompts_from_ids
from cw_lens.sinks import SINK_DETECTORS
from cw_lens.sites import UnsupportedModelError
from cw_lens.studies.cone import cone, cone_points, layer_cone, outputs_in_frames
from cw_lens.studies.losses import StudyText
from cw_lens.studies.readings import from_bytes, joined, read_text, to_bytes
from cw_lens.wrapping import wrap_model
from tests.layers import random_layer
from tests.test_alignment import FEW, planted, reading, same_tables, texts_of
from tests.tiny import tiny_llama

pytestmark = pytest.mark.apart

NAMES = ("a", "b", "sink_norm", "cone_angle", "inside", "inside_without")


def literal(layer: LayerAttention, head: int, share: float = 0.9, sinks: str = "cosine") -> dict:
    """Vectors in d_model, one at a time."""
    value = (layer.value[0, head].double() @ layer.W_O[head].double()).numpy()
    marked = SINK_DETECTORS[sinks](layer)[0, head].tolist()
    others = [v for key, v in enumerate(value) if key > 0 and not marked[key]]
    if not others:
        return dict.fromkeys(NAMES, np.nan) | {"sink_norm": np.linalg.norm(value[0])}
    mu = np.mean(others, axis=0)
    mu /= np.linalg.norm(mu)
    a = value[0] @ mu
    beside = value[0] - a * mu
    b = np.linalg.norm(beside)
    u = beside / b if b > 1e-6 * np.linalg.norm(value[0]) else 0 * beside

    def angle(v: np.ndarray) -> float:
        return np.degrees(np.arccos(np.clip(v @ mu / np.linalg.norm(v), -1, 1)))

    angles = sorted(angle(v) for v in others if np.linalg.norm(v) > 0)
    edge = next(x for n, x in enumerate(angles, start=1) if n >= share * len(angles) - 1e-9)
    pattern = layer.pattern[0, head].double().numpy()
    outputs = [row @ value for row in pattern[1:]]
    without = [row[1:] @ value[1:] for row in pattern[1:]]
    order = sorted(range(len(outputs)), key=lambda i: (np.linalg.norm(outputs[i]), i))
    low = order[: len(outputs) // 4]
    found = dict(zip(NAMES, (a, b, np.linalg.norm(value[0]), edge), strict=False))
    for name, rows in (("inside", outputs), ("inside_without", without)):
        seen = [angle(rows[i]) <= edge + 1e-3 for i in low if np.linalg.norm(rows[i]) > 0]
        found[name] = np.mean(seen) if seen else np.nan
    found["x"], found["y"] = ([o @ axis for o in outputs] for axis in (mu, u))
    found["norm"] = [np.linalg.norm(o) for o in outputs]
    found["low"] = [i in low for i in range(len(outputs))]
    return found


@pytest.mark.parametrize("length", [1, 2, 3, 5, 14])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_head_is_what_its_vectors_in_d_model_say(length, dtype):
    layer = random_layer(1, heads=6, groups=2, length=length, dtype=dtype, seed=length)
    found = layer_cone(layer)
    tolerance = 1e-8 if dtype == torch.float64 else 1e-4
    for head in range(6):
        for name, numbers in literal(layer, head).items():
            abs_tolerance = 1e-5 if name in ("x", "y", "norm", "cone_angle") else tolerance
            assert found[name][head].tolist() == pytest.approx(
                numbers, rel=1e-5, abs=abs_tolerance, nan_ok=True
            ), name


@pytest.mark.parametrize("share", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("sinks", ["received_attention", "first"])
def test_share_and_detector_are_heeded(share, sinks):
    layer = random_layer(1, heads=4, groups=2, length=11, seed=3)
    found = layer_cone(layer, share=share, sinks=sinks)
    for head in range(4):
        expected = literal(layer, head, share, sinks)
        for name in NAMES:
            assert found[name][head].item() == pytest.approx(expected[name], rel=1e-9), name


THETA = torch.arange(1, 11).double()
A, B = -2.0, 3.0


def fan(a: float = A, b: float = B) -> Tensor:
    """The sink a e1 + b e3, a second sink, and twenty values at 1 to 10 degrees on either side."""
    angle = torch.deg2rad(torch.stack([THETA, -THETA], dim=1).flatten())
    values = torch.stack([angle.cos(), angle.sin(), 0 * angle], dim=1)
    sinks = torch.tensor([[a, 0, b], [0, 50.0, 50.0]]).double()
    return torch.cat([sinks, values])


def fan_attention() -> Tensor:
    """Queries 1 to 5, which look at the sink, have the shortest outputs. Without its term 1 to 3,
    at both values of 1 degree, are inside the cone, and 4 and 5, at one of 10 degrees, are not."""
    pattern = torch.zeros(22, 22).double()
    pattern[0, 0] = 1
    for query in range(1, 22):
        alpha = 0.2 if query <= 5 else 0
        pattern[query, 0] = alpha
        if query <= 3:
            pattern[query, 2:4] = (1 - alpha) / 2
        elif query <= 5:
            pattern[query, 20] = 1 - alpha
        else:
            pattern[query, 2] = 1
    return pattern


def planted_cone(a: float = A, b: float = B, second: bool = True) -> LayerAttention:
    residual = torch.eye(22).double()
    if second:
        residual[1] = residual[0]
    coordinates, pattern = fan(a, b), fan_attention()
    return planted(coordinates[None], pattern[None], residual)


def test_a_planted_fan_is_recovered():
    found = layer_cone(planted_cone())
    assert found["a"].item() == pytest.approx(A, rel=1e-9)
    assert found["b"].item() == pytest.approx(B, rel=1e-9)
    assert found["sink_norm"].item() == pytest.approx(13**0.5, rel=1e-9)
    assert found["cone_angle"].item() == pytest.approx(9, rel=1e-6)
    # outputs of queries 1 to 3: 0.2 s + 0.8 cos(1 degree) e1
    along = 0.2 * A + 0.8 * np.cos(np.radians(1))
    assert found["x"][0, :3].tolist() == pytest.approx([along] * 3, rel=1e-6)
    assert found["y"][0, :3].tolist() == pytest.approx([0.2 * B] * 3, rel=1e-6)
    assert found["low"][0].tolist() == [True] * 5 + [False] * 16
    assert found["inside"].item() == 0
    assert found["inside_without"].item() == pytest.approx(3 / 5)


def test_a_second_sink_tilts_the_cone_unless_it_is_found():
    tilted = layer_cone(planted_cone(second=False))
    assert abs(tilted["a"].item() - A) > 0.1
    assert layer_cone(planted_cone(), sinks="first")["a"].item() == pytest.approx(
        tilted["a"].item(), rel=1e-12
    )


def test_a_sink_along_the_mean_has_no_other_direction():
    found = layer_cone(planted_cone(a=4, b=0))
    assert found["a"].item() == pytest.approx(4)
    assert found["b"].item() == pytest.approx(0, abs=1e-6)
    assert found["y"].tolist() == [[0.0] * 21] and found["u"].abs().max() == 0
    assert found["inside"].item() == found["inside_without"].item() == 1


def test_without_another_value_there_is_no_cone():
    all_sinks = planted(torch.randn(1, 7, 3).double(), residual=torch.ones(7, 7).double())
    opposed = torch.tensor([[1.0, 2, 3], [1, 0, 0], [-1, 0, 0], [0, 2, 0], [0, -2, 0]]).double()
    rounded = torch.tensor([[1.0, 2, 3], [0.1, 0, 0], [0.2, 0, 0], [-0.3, 0, 0]]).double()
    for layer in (all_sinks, planted(opposed[None]), planted(rounded[None])):
        found = layer_cone(layer)
        for name in ("a", "b", "cone_angle", "inside", "inside_without", "x", "y"):
            assert found[name].isnan().all(), name
        assert found["sink_norm"].isfinite().all()


def test_values_and_outputs_of_length_zero_have_no_angle():
    coordinates = fan()
    coordinates[5] = 0
    found = layer_cone(planted(coordinates[None], fan_attention()[None]))
    assert found["left_out"].tolist() == [1]
    pattern = fan_attention()
    pattern[1:5] = 0
    pattern[1:5, 5] = 1  # four of the five shortest are of length 0
    layer = planted(coordinates[None], pattern[None])
    found, expected = layer_cone(layer), literal(layer, 0)
    assert expected["inside"] in (0, 1)
    for name in NAMES:
        assert found[name].item() == pytest.approx(expected[name], rel=1e-6, abs=1e-6), name


def test_tables_are_means_over_texts_and_heads():
    texts = texts_of("cone", layer_cone, (9, 12, 3, 8, 10))
    result = cone(texts, **FEW)
    for name in ("a", "inside", "inside_without", "cone_angle"):
        numbers = np.stack([text["cone"][name] for text in texts])
        defined = numbers if name in ("a", "cone_angle") else np.delete(numbers, 2, axis=0)
        assert result.heads[name].to_numpy() == pytest.approx(defined.mean(axis=0).ravel())
        assert result.layers[name].to_numpy() == pytest.approx(defined.mean(axis=(0, 2)))
        assert set(result.heads[f"{name}_n"]) == {len(defined)}
        assert (result.layers[f"{name}_low"] <= result.layers[name]).all()
        assert (result.layers[name] <= result.layers[f"{name}_high"]).all()
    gain = result.heads["inside_without"] - result.heads["inside"]
    assert result.heads["without_gain"].to_numpy() == pytest.approx(gain.to_numpy())
    assert set(result.heads["texts"]) == {5} and set(result.heads["left_out"]) == {0}
    assert "inside_rerun" not in result.heads
    assert cone(texts[:1], **FEW).heads["a_low"].isna().all()
    narrow = cone(texts, confidence=0.5, **FEW)
    assert (narrow.layers["a_low"] > result.layers["a_low"]).all()


def test_split_readings_join_into_the_same_tables():
    texts = texts_of("mine", layer_cone)
    parts = joined(texts[3:], texts[:1], texts[1:3])
    options = {"study": "mine", **FEW}
    same_tables(cone(texts, **options), cone(parts, **options))
    same_tables(cone(texts, **options), cone(texts[::-1], **options))


def test_points_hold_the_outputs_with_and_without_the_sink():
    clean = reading("cone", [layer_cone(planted_cone())])
    points = cone_points([clean], 2, 0)
    assert len(points) == 21 and points["query"].tolist() == list(range(1, 22))
    assert points["x_without"][:3].tolist() == pytest.approx([0.8 * np.cos(np.radians(1))] * 3)
    assert points["y_without"].to_numpy() == pytest.approx(np.zeros(21), abs=1e-6)
    assert points["low"].tolist() == [True] * 5 + [False] * 16
    assert points["attention"].tolist() == pytest.approx([0.2] * 5 + [0] * 16)
    assert points["norm"][20] == pytest.approx(1)


@pytest.fixture(scope="module")
def model():
    return wrap_model(tiny_llama())


def test_a_second_pass_is_read_in_the_frames_of_the_clean_one(model):
    rows = [[1, 5, 9, 4, 3, 3, 8, 20, 11], [1, 7, 30, 31, 32, 33]]
    texts = [StudyText("d", n, prompts_from_ids(model, [row])) for n, row in enumerate(rows)]
    study = {"cone": partial(layer_cone, sinks="first", share=0.3)}
    clean = [read_text(model, text, study) for text in texts]
    # kept and read again, as a store does
    clean = [from_bytes(x.data, x.example, x.tokens, to_bytes(x)) for x in clean]
    again = []
    for text, before in zip(texts, clean, strict=True):
        with scaled_values(model, 0.0, positions="first", layers=[1], prompts=text.prompts):
            again.append(read_text(model, text, {"rerun": outputs_in_frames(before)}))
    result = cone(clean, again, **FEW)
    heads = result.heads
    # nothing before layer 1 is changed: there the sink's term alone is gone
    first, last = (heads["layer"] == layer for layer in (0, 1))
    assert heads["inside_rerun"][first].tolist() == heads["inside"][first].tolist()
    assert heads["inside_rerun"][last].tolist() == heads["inside_without"][last].tolist()
    assert heads["inside"].tolist() != heads["inside_without"].tolist()
    gain = heads["inside_rerun"] - heads["inside"]
    assert heads["rerun_gain"].to_numpy() == pytest.approx(gain.to_numpy())
    for before, after in zip(clean, again, strict=True):
        assert after["rerun"]["x"][0] == pytest.approx(before["cone"]["x"][0])
        points = cone_points([before], 1, 2)
        for axis in ("x", "y"):
            taken = points[f"{axis}_without"].to_numpy()
            assert after["rerun"][axis][1, 2] == pytest.approx(taken, abs=1e-4)
    with pytest.raises(InputError, match="the second pass read 1 texts, the first 2, and they"):
        cone(clean, again[:1])
    with pytest.raises(InputError, match="layer 0 has no frame in d, example 1.*another text"):
        read_text(model, texts[0], {"rerun": outputs_in_frames(clean[1])})
    last_only = read_text(model, texts[0], study, layers=[1])
    with pytest.raises(InputError, match="of layers 1: it is of a layer not read. Read the same"):
        read_text(model, texts[0], {"rerun": outputs_in_frames(last_only)})


def test_frames_of_layers_of_other_sizes():
    big = random_layer(1, 4, 2, 9, seed=1)
    small = replace(random_layer(1, 2, 2, 9, d_head=3, seed=2), index=2)
    small = replace(small, prompt_digest=big.prompt_digest)
    clean = reading("cone", [layer_cone(big), layer_cone(small)])
    clean = replace(clean, layers=(1, 2))
    rerun = outputs_in_frames(clean)
    for layer in (big, small):
        for name in ("inside", "x", "y", "norm"):
            expected = layer_cone(layer)[name]
            assert rerun(layer)[name].numpy() == pytest.approx(expected.numpy(), rel=1e-6)
    heads = cone([clean], **FEW).heads
    assert len(heads) == 6 and heads["a"].notna().all()


def test_what_cannot_be_read_is_refused():
    layer = random_layer(1)
    with pytest.raises(UnsupportedModelError, match="layer 1 has a gate between the values and"):
        layer_cone(random_layer(1, gated=True))
    with pytest.raises(InputError, match="layer 1 holds 2 examples"):
        layer_cone(random_layer(2))
    for share in (0.0, 1.1, float("nan")):
        with pytest.raises(InputError, match=f"share is {share}; it is what the cone holds"):
            layer_cone(layer, share=share)
    with pytest.raises(InputError, match="unknown detector 'cosin'; there are cosine, centred"):
        layer_cone(layer, sinks="cosin")
    with pytest.raises(InputError, match="there are no readings of 'cone'"):
        cone([])
    with pytest.raises(InputError, match="there are no readings of 'cone'"):
        cone_points([], 0, 0)
    texts = texts_of("cone", layer_cone, (6,))
    for number, head in ((4, 0), (2, 4), (2, -1)):
        with pytest.raises(InputError, match=f"layer {number}, head {head} was not read; there"):
            cone_points(texts, number, head)
