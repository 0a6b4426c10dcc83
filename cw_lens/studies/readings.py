"""What one pass over a corpus shows, text by text: every streamed study is fed from it.

A study is a function of one `LayerAttention` that returns a few small arrays. They are kept apart
for each text, so that readings of two halves of a corpus join into exactly those of the whole, and
every number can be given the interval that drawing other texts would allow.
"""

import io
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cw_lens.errors import InputError
from cw_lens.layer import LayerAttention
from cw_lens.runs import LowOutputWarning, capture
from cw_lens.studies.losses import StudyText

LayerStudy = Callable[[LayerAttention], dict[str, Tensor]]
"""One layer of one text, a batch of one without padding -> arrays by name, without batch axis."""


@dataclass(frozen=True, eq=False)
class TextReading:
    """What the studies found in one text.

    Attributes:
        data, example: the text's corpus and number there.
        tokens: how many it has.
        layers: the number of each layer along the first axis of every array.
        found: study -> name -> array [layer, ...]; where layers differ in size, the smaller ones
            are filled up with NaN.
    """

    data: str
    example: int
    tokens: int
    layers: tuple[int, ...]
    found: Mapping[str, Mapping[str, np.ndarray]]

    def __getitem__(self, study: str) -> Mapping[str, np.ndarray]:
        if study not in self.found:
            raise KeyError(f"{study!r} was not read; there are {', '.join(self.found)}.")
        return self.found[study]


def read_text(
    model: Any,
    text: StudyText,
    studies: Mapping[str, LayerStudy],
    *,
    layers: Sequence[int] | None = None,
    space: str = "residual",
    allow_folded: bool = False,
) -> TextReading:
    """What each study finds in each layer of one text, from one forward pass.

    Args:
        model: a decoder of TransformerLens, or what `load_model` and `wrap_model` return.
        text: a batch of one, without padding.
        studies: by name.
        layers: the layers to read, by default all that have attention.
        space, allow_folded: as `capture`.

    Raises:
        InputError: more than one example, or padding; and as `capture`.
        IdentityError, UnsupportedModelError: as `capture`, or a study that cannot read a layer.
    """
    if len(text.prompts.ids) != 1 or not bool(text.prompts.mask.all()):
        raise InputError(
            f"{text.data}, example {text.example}: a reading takes one text without padding. "
            "Split a padded batch with one_by_one(prompts)."
        )

    def reduce(layer: LayerAttention) -> dict[str, dict[str, np.ndarray]]:
        return {
            name: {key: value.detach().cpu().numpy() for key, value in study(layer).items()}
            for name, study in studies.items()
        }

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", LowOutputWarning
        )  # they are counted, not shown text by text
        with torch.no_grad():
            run = capture(
                model,
                text.prompts,
                layers=layers,
                reduce=reduce,
                space=space,
                allow_folded=allow_folded,
            )
    found = {
        name: {key: _stacked([layer[name][key] for layer in run.layers]) for key in held}
        for name, held in run.layers[0].items()
    }
    numbers = tuple(certificate.layer for certificate in run.certificates)
    return TextReading(text.data, text.example, text.prompts.ids.shape[1], numbers, found)


def read_texts(
    model: Any, texts: Sequence[StudyText], studies: Mapping[str, LayerStudy], **options: Any
) -> Iterator[TextReading]:
    """`read_text` of each, in order; options as there."""
    for text in texts:
        yield read_text(model, text, studies, **options)


def joined(*parts: Sequence[TextReading]) -> list[TextReading]:
    """Readings of parts of a corpus as those of the whole, ordered by corpus and number.

    Whatever the parts were, the result is the same, and so is every number made from it.

    Raises:
        InputError: a text that is in two parts, or parts that read different layers.
    """
    readings = sorted(
        (reading for part in parts for reading in part), key=lambda r: (r.data, r.example)
    )
    for before, after in pairwise(readings):
        if (before.data, before.example) == (after.data, after.example):
            raise InputError(f"{after.data}, example {after.example} was read twice; join it once.")
        if before.layers != after.layers:
            raise InputError(
                f"{after.data}, example {after.example} was read in layers {after.layers}, "
                f"{before.data}, example {before.example} in {before.layers}. Read the same layers."
            )
    return readings


def by_corpus(readings: Sequence[TextReading]) -> dict[str, list[TextReading]]:
    """The readings of each corpus, ordered as `joined` does.

    Raises:
        InputError: no readings, or as `joined`.
    """
    if not readings:
        raise InputError("no readings: give those of at least one text.")
    corpora: dict[str, list[TextReading]] = {}
    for reading in joined(readings):
        corpora.setdefault(reading.data, []).append(reading)
    return corpora


READING_COLUMNS: dict[str, type] = {"data": str, "example": int, "tokens": int, "arrays": bytes}
"""The columns of a store of readings: one unit, and one batch, for each text."""


def reading_units(
    model: Any,
    texts: Sequence[StudyText],
    studies: Mapping[str, LayerStudy],
    done: Collection[int],
    **options: Any,
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The number of each text that is not done yet, and its reading as a store keeps it.

    Args:
        done: the places, among the texts, of those that are left out.
        options: as `read_text`.
    """
    for place, text in enumerate(texts):
        if place not in done:
            reading = read_text(model, text, studies, **options)
            who = {"data": text.data, "example": text.example, "tokens": reading.tokens}
            yield place, [{**who, "arrays": to_bytes(reading)}]


def kept_readings(table: pd.DataFrame) -> list[TextReading]:
    """The readings in the rows of a store, joined."""
    rows = table[list(READING_COLUMNS)].itertuples(index=False, name=None)
    return joined([from_bytes(*row) for row in rows])


def to_bytes(reading: TextReading) -> bytes:
    """The arrays of a reading, as a store keeps them."""
    arrays: dict[str, Any] = {
        f"{study}/{name}": array
        for study, held in reading.found.items()
        for name, array in held.items()
    }
    file = io.BytesIO()
    np.savez(file, layers=np.array(reading.layers), **arrays)
    return file.getvalue()


def from_bytes(data: str, example: int, tokens: int, content: bytes) -> TextReading:
    """The reading whose arrays `to_bytes` gave."""
    found: dict[str, dict[str, np.ndarray]] = {}
    with np.load(io.BytesIO(content), allow_pickle=False) as held:
        layers = tuple(held["layers"].tolist())
        for key in held.files:
            if key != "layers":
                study, name = key.split("/")
                found.setdefault(study, {})[name] = held[key]
    return TextReading(data, example, tokens, layers, found)


def _stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Layers on a new first axis; those of other sizes are filled up with NaN."""
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    shape = np.max([array.shape for array in arrays], axis=0)
    stacked = np.full((len(arrays), *shape), np.nan, dtype=np.result_type(*arrays, np.float32))
    for row, array in zip(stacked, arrays, strict=True):
        row[tuple(slice(size) for size in array.shape)] = array
    return stacked
