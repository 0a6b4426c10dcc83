"""Cosines between projected values: literal, planted, split, and what has none."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from cw_lens.errors import InputError
from cw_lens.layer import LayerAttention, layer_attention
from cw_lens.sites import UnsupportedModelError
from cw_lens.studies.alignment import COSINES, alignment, layer_alignment, mean_of_finite
from cw_lens.studies.readings import TextReading, _stacked, joined
from tests.layers import random_layer

pytestmark = pytest.mark.apart

FEW: dict[str, Any] = {"resamples": 200}


def planted(
    coordinates: Tensor,
    pattern: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    ids: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> LayerAttention:
    """A layer whose projected values have these coordinates, [head, key, d_head], in an
    orthonormal frame of each head's own; W_O and the values themselves are anything."""
    g = torch.Generator().manual_seed(0)
    heads, keys, d_head = coordinates.shape
    if residual is None:
        residual = torch.eye(keys, max(keys, d_head)).double()
    d_model = residual.shape[1]
    frame = torch.linalg.qr(torch.randn(heads, d_model, d_head, generator=g).double())[0].mT
    mix = torch.randn(heads, d_head, d_head, generator=g).double() + 2 * torch.eye(d_head)
    if pattern is None:
        pattern = torch.ones(heads, keys, keys).tril().double()
        pattern = pattern / pattern.sum(dim=-1, keepdim=True)
    return layer_attention(
        3,
        pattern[None].to(dtype),
        (coordinates.double() @ mix.inverse())[None].to(dtype),
        W_O=(mix @ frame).to(dtype),
        b_O=None,
        residual=residual[None].to(dtype),
        ids=torch.arange(keys)[None] if ids is None else ids[None],
        mask=torch.ones(1, keys, dtype=torch.bool),
        causal=bool((pattern.triu(1) == 0).all()),
    )


def reading(study: str, found: list[dict[str, Tensor]], example: int = 0) -> TextReading:
    """What a study found in some layers of one text, as `read_text` stacks it."""
    arrays = {name: _stacked([layer[name].numpy() for layer in found]) for name in found[0]}
    layers = tuple(range(2, 2 + len(found)))
    return TextReading("made", example, 7, layers, {study: arrays})


def texts_of(study, function, lengths=(5, 9, 2, 7, 6), heads=4, groups=2) -> list[TextReading]:
    """A study's readings of random texts of these lengths, two layers each."""
    return [
        reading(
            study,
            [
                function(random_layer(1, heads, groups, length, seed=10 * text + layer))
                for layer in range(2)
            ],
            text,
        )
        for text, length in enumerate(lengths)
    ]


def same_tables(one: object, other: object) -> None:
    for name, table in vars(one).items():
        if isinstance(table, pd.DataFrame):
            pd.testing.assert_frame_equal(table, vars(other)[name], check_exact=True)


def literal(layer: LayerAttention, head: int) -> dict[str, float]:
    """Every pair by itself, in d_model."""
    value = (layer.value[0, head].double() @ layer.W_O[head].double()).numpy()
    held = [v for v in value[1:] if np.linalg.norm(v) > 0]

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    of_first = [cosine(value[0], v) for v in held] if np.linalg.norm(value[0]) > 0 else []
    of_others = [cosine(a, b) for a, b in combinations(held, 2)]
    numbers = []
    for cosines in (of_first, of_others):
        numbers += [np.mean(cosines), np.std(cosines)] if cosines else [np.nan, np.nan]
    lost = len(value) - len(held) - (np.linalg.norm(value[0]) > 0)
    return dict(zip(COSINES, numbers, strict=True)) | {"left_out": lost}


@pytest.mark.parametrize("length", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cosines_are_those_of_every_pair_in_d_model(length, dtype):
    layer = random_layer(1, heads=6, groups=2, length=length, dtype=dtype, seed=length)
    found = layer_alignment(layer)
    for head in range(6):
        expected = literal(layer, head)
        for name, number in expected.items():
            tolerance = 1e-7 if dtype == torch.float64 else 1e-5
            assert found[name][head].item() == pytest.approx(number, abs=tolerance, nan_ok=True)


def test_a_planted_fan_has_its_cosines():
    """Three values at +theta and two at -theta from the opposite of the first."""
    theta = torch.tensor(0.4).double()
    sign = torch.tensor([1.0, 1, 1, -1, -1]).double()
    fan = torch.stack([theta.cos().expand(5), sign * theta.sin(), 0 * sign], dim=1)
    lengths = torch.tensor([1.0, 2, 30, 0.1, 5])[:, None]
    coordinates = torch.cat([torch.tensor([[-7.0, 0, 0]]), lengths * fan])[None]
    found = layer_alignment(planted(coordinates))
    c, n_same, n = np.cos(0.8), 3 + 1, 10
    mean = (n_same + (n - n_same) * c) / n
    spread = np.sqrt((n_same * (1 - mean) ** 2 + (n - n_same) * (c - mean) ** 2) / n)
    assert found["first_cosine"].item() == pytest.approx(-np.cos(0.4), abs=1e-7)
    assert found["first_spread"].item() == pytest.approx(0, abs=1e-7)
    assert found["others_cosine"].item() == pytest.approx(mean, abs=1e-7)
    assert found["others_spread"].item() == pytest.approx(spread, abs=1e-7)


def test_values_of_length_zero_are_left_out_and_counted():
    coordinates = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1)).double()
    coordinates[0, 2] = 0
    coordinates[1, 0] = 0
    layer = planted(coordinates)
    found = layer_alignment(layer)
    assert found["left_out"].tolist() == [1, 1]
    for head in range(2):
        expected = literal(layer, head)
        for name, number in expected.items():
            assert found[name][head].item() == pytest.approx(number, abs=1e-9, nan_ok=True)
    assert torch.isnan(found["first_cosine"]).tolist() == [False, True]
    assert not torch.isnan(found["others_cosine"]).any()


def test_tables_are_means_over_texts_and_heads():
    readings = texts_of("alignment", layer_alignment)
    result = alignment(readings, **FEW)
    assert list(result.heads["layer"]) == [2] * 4 + [3] * 4
    assert list(result.heads["head"]) == [0, 1, 2, 3] * 2
    numbers = np.stack([text["alignment"]["others_cosine"] for text in readings])
    defined = np.delete(numbers, 2, axis=0)  # the text of two tokens has no other pair
    assert result.heads["others_cosine"].to_numpy() == pytest.approx(
        defined.mean(axis=0).ravel(), rel=1e-12
    )
    assert set(result.heads["others_cosine_n"]) == {4}
    assert set(result.heads["first_cosine_n"]) == {5}
    assert result.layers["layer"].tolist() == [2, 3]
    assert result.layers["others_cosine"].to_numpy() == pytest.approx(defined.mean(axis=(0, 2)))
    for name in COSINES:
        below = result.layers[f"{name}_low"] < result.layers[name]
        assert below.all() and (result.layers[name] < result.layers[f"{name}_high"]).all()
    assert result.heads["left_out"].tolist() == [0] * 8


def test_intervals_are_over_texts_and_options_reach_them():
    readings = texts_of("mine", layer_alignment)
    wide = alignment(readings, study="mine", **FEW).layers
    narrow = alignment(readings, study="mine", confidence=0.5, **FEW).layers
    assert (narrow["first_cosine_low"] > wide["first_cosine_low"]).all()
    one = alignment(readings[:1], study="mine", **FEW)
    assert one.heads["first_cosine_low"].isna().all()
    assert one.heads["first_cosine"].notna().all()


def test_split_readings_join_into_the_same_tables():
    readings = texts_of("alignment", layer_alignment)
    parts = joined(readings[3:], readings[:1], readings[1:3])
    same_tables(alignment(readings, **FEW), alignment(parts, **FEW))
    same_tables(alignment(readings, **FEW), alignment(readings[::-1], **FEW))


def test_layers_may_have_fewer_heads():
    layers = [random_layer(1, 4, 2, 6, seed=1), random_layer(1, 2, 2, 6, seed=2)]
    texts = [reading("alignment", [layer_alignment(layer) for layer in layers])]
    result = alignment(texts, **FEW)
    assert list(zip(result.heads["layer"], result.heads["head"], strict=True)) == [
        *((2, head) for head in range(4)),
        *((3, head) for head in range(2)),
    ]
    expected = layer_alignment(layers[1])["first_cosine"].mean().item()
    assert result.layers["first_cosine"][1] == pytest.approx(expected, rel=1e-12)


def test_what_cannot_be_read_is_refused():
    with pytest.raises(UnsupportedModelError, match="layer 1 has a gate between the values and"):
        layer_alignment(random_layer(1, gated=True))
    with pytest.raises(InputError, match="layer 1 holds 2 examples, 0 positions of padding and 7"):
        layer_alignment(random_layer(2))
    padded = random_layer(2, padding="left").examples(slice(1, 2))
    with pytest.raises(InputError, match="holds 1 examples, 1 positions of padding"):
        layer_alignment(padded)
    whole = random_layer(1)
    with pytest.raises(InputError, match="0 positions of padding and 3 of 7 queries"):
        layer_alignment(whole.queries(4, 7))
    with pytest.raises(InputError, match="there are no readings of 'alignment'; read at least one"):
        alignment([])
    text = texts_of("alignment", layer_alignment, (4,))[0]
    with pytest.raises(InputError, match="example 0 was read twice"):
        alignment([text, text])
    with pytest.raises(InputError, match="Read the same layers"):
        alignment([text, replace(text, example=1, layers=(0, 1))])


def test_a_mean_of_finite_numbers():
    x = np.array([[1.0, np.nan, 3], [np.nan, np.nan, np.inf]])
    assert mean_of_finite(x, axis=1) == pytest.approx([2, np.nan], nan_ok=True)
    assert mean_of_finite(x, axis=0) == pytest.approx([1, np.nan, 3], nan_ok=True)
