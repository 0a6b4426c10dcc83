"""How many sinks there are, where, and in which layers they matter (SPEC 5 and 8)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from cw_lens.errors import InputError, require_known
from cw_lens.layer import LayerAttention
from cw_lens.sinks import CROWDED_SINKS, SINK_DETECTORS, warn_if_crowded
from cw_lens.statistics import bootstrap_means, interval_columns
from cw_lens.studies.alignment import (
    mean_of_finite,
    mean_tables,
    require_one_text,
    texts_together,
)
from cw_lens.studies.losses import StudyText
from cw_lens.studies.readings import TextReading, joined

DETECTORS = ("cosine", "centred_cosine")
SINK_LAYER_ATTENTION = 0.3
"""A layer is a sink layer if its mean attention to the first token is above this (SPEC 8)."""

Marks = Shaped[np.ndarray, "layer head _key"]  # texts differ in their keys
Shares = Float[np.ndarray, "layer _key"]


@dataclass(frozen=True, eq=False)
class SinkCounts:
    """The sinks that each detector marks.

    Attributes:
        layers: one row per detector and layer: `sinks` per text, the mean over heads and texts,
            and `protected_share` of the (head, token) pairs, with intervals over texts in `_low`
            and `_high` and the texts in `_n`; `most` in one head of one text; `crowded` where the
            share is above `CROWDED_SINKS` and some head has several.
        attention: one row per layer: `first_attention`, the mean over queries, heads and texts of
            the first token's weight, with its interval.
        positions: those most often marked: one row per detector, layer and position, in how many
            texts it is `marked` (a mean over heads), how many `texts` reach it, and their ratio,
            `share`.
        tokens: those most often marked: one row per detector, layer and `token_id`, how often it
            is `marked` and how often it `occurs`, and their ratio, `share`; None without texts.
    """

    layers: pd.DataFrame
    attention: pd.DataFrame
    positions: pd.DataFrame
    tokens: pd.DataFrame | None


def layer_sinks(
    layer: LayerAttention, *, detectors: Sequence[str] = DETECTORS
) -> dict[str, Shaped[Tensor, "head *key"]]:
    """What each detector marks, [head, key] under its name, and `first_attention`, [head].

    The attention is the mean over all queries, the first included, as in `HeadProfile`.

    Args:
        layer: one text.
        detectors: names out of `SINK_DETECTORS`; functools.partial sets others.

    Raises:
        InputError: an unknown detector, and as `require_one_text`.
    """
    for name in detectors:
        require_known("detector", name, SINK_DETECTORS)
    require_one_text(layer)
    marked = {name: SINK_DETECTORS[name](layer)[0] for name in detectors}
    return marked | {"first_attention": layer.pattern[0, :, :, 0].double().mean(dim=-1)}


def sink_counts(
    readings: Sequence[TextReading],
    texts: Sequence[StudyText] | None = None,
    *,
    study: str = "sinks",
    top: int = 10,
    **options: Any,
) -> SinkCounts:
    """Sinks, protected shares and first-token attention by layer, with intervals over texts.

    Args:
        readings: of `layer_sinks`.
        texts: those that were read, to tell which tokens are marked.
        study: the name under which it was read.
        top: the most positions, and tokens, to list for each detector and layer.
        options: confidence, resamples and seed of the bootstrap, as `bootstrap_means`.

    Raises:
        InputError: no readings, a reading whose text is not among the texts, or as `joined` and
            `bootstrap_means`.

    Warns:
        CrowdedSinksWarning: where a detector marks more than `CROWDED_SINKS` of the tokens.
    """
    layers, found = texts_together(readings, study, ("first_attention",))
    read = joined(readings)
    places = [np.arange(text.tokens) for text in read]
    names = None if texts is None else _token_names(read, texts)
    tables: dict[str, list[pd.DataFrame]] = {"layers": [], "positions": [], "tokens": []}
    for detector in read[0][study]:
        if detector == "first_attention":
            continue
        marked = [text[study][detector] for text in read]
        _warn(marked, layers, detector)
        shares = [mean_of_finite(marks, axis=1) for marks in marked]  # of the heads that there are
        made = {"layers": _counts(marked, shares, layers, options)}
        made["positions"] = _frequent(shares, places, layers, top).rename(
            columns={"label": "position", "occurs": "texts"}
        )
        if names is not None:
            table = _frequent(shares, [ids for ids, _ in names], layers, top)
            spelled = {
                int(i): token for ids, row in names for i, token in zip(ids, row, strict=True)
            }
            table.insert(2, "token", [spelled[label] for label in table["label"].tolist()])
            made["tokens"] = table.rename(columns={"label": "token_id"})
        for name, table in made.items():
            table.insert(0, "detector", detector)
            tables[name].append(table)
    joint = {name: pd.concat(rows, ignore_index=True) for name, rows in tables.items() if rows}
    return SinkCounts(
        layers=joint["layers"],
        attention=mean_tables(layers, found, **options)[1],
        positions=joint["positions"],
        tokens=joint.get("tokens"),
    )


def sink_layers(
    readings: Sequence[TextReading],
    threshold: float = SINK_LAYER_ATTENTION,
    *,
    study: str = "sinks",
) -> tuple[int, ...]:
    """The layers whose mean attention to the first token, over heads and texts, is above this.

    Raises:
        InputError: no readings, or as `joined`.
    """
    layers, found = texts_together(readings, study, ("first_attention",))
    mean = mean_of_finite(mean_of_finite(found["first_attention"], axis=1), axis=1)
    return tuple(layer for layer, above in zip(layers, mean > threshold, strict=True) if above)


def _counts(
    marked: Sequence[Marks], shares: Sequence[Shares], layers: Sequence[int], options: dict
) -> pd.DataFrame:
    """One row per layer: sinks, protected share, the most in one head, whether that is a crowd."""
    sinks = np.stack([share.sum(axis=1) for share in shares], axis=1)
    tokens = np.broadcast_to([float(share.shape[1]) for share in shares], sinks.shape)
    most = np.max([np.nansum(marks, axis=2).max(axis=1) for marks in marked], axis=0).astype(int)
    mean = bootstrap_means(lambda mean: mean, sinks, **options)
    share = bootstrap_means(lambda sinks, tokens: sinks / tokens, sinks, tokens, **options)
    columns = interval_columns("sinks", mean) | interval_columns("protected_share", share)
    crowded = (np.array(columns["protected_share"]) > CROWDED_SINKS) & (most > 1)
    return pd.DataFrame({"layer": list(layers)} | columns | {"most": most, "crowded": crowded})


def _warn(marked: Sequence[Marks], layers: Sequence[int], detector: str) -> None:
    """`warn_if_crowded` over all texts, which become one padded batch."""
    sizes = np.array([marks.shape[2] for marks in marked])
    whole = np.zeros((len(marked), *marked[0].shape[:2], sizes.max()), dtype=bool)
    for row, marks in zip(whole, marked, strict=True):
        row[:, :, : marks.shape[2]] = marks == 1
    mask = torch.from_numpy(np.arange(sizes.max()) < sizes[:, None])
    heads = np.isfinite(marked[0][:, :, 0]).sum(axis=1)  # a layer may lack some
    for n in np.unique(heads):
        same = np.flatnonzero(heads == n).tolist()
        of_layers = torch.from_numpy(whole[:, same, :n])
        warn_if_crowded(of_layers, mask, [layers[place] for place in same], detector)


def _frequent(
    shares: Sequence[Shares],
    labels: Sequence[Int[np.ndarray, " _key"]],
    layers: Sequence[int],
    top: int,
) -> pd.DataFrame:
    """One row per layer and label that is marked, the most marked first: `marked`, `occurs`."""
    known, place = np.unique(np.concatenate(labels), return_inverse=True)
    occurs = np.bincount(place)
    share = np.concatenate(shares, axis=1)
    rows = []
    for layer, weights in zip(layers, share, strict=True):
        marked = np.bincount(place, weights=weights)
        order = np.argsort(-marked, kind="stable")[:top]
        order = order[marked[order] > 0]
        columns = {"label": known[order], "marked": marked[order], "occurs": occurs[order]}
        rows.append(pd.DataFrame({"layer": layer} | columns))
    table = pd.concat(rows, ignore_index=True)
    return table.assign(share=table["marked"] / table["occurs"])


def _token_names(
    readings: Sequence[TextReading], texts: Sequence[StudyText]
) -> list[tuple[Int[np.ndarray, " _key"], tuple[str, ...]]]:
    """The token ids of each text that was read, and how they are spelled."""
    given = {(text.data, text.example): text.prompts for text in texts}
    names = []
    for reading in readings:
        prompts = given.get((reading.data, reading.example))
        if prompts is None or prompts.ids.shape != (1, reading.tokens):
            raise InputError(
                f"{reading.data}, example {reading.example} of {reading.tokens} tokens is not "
                "among the texts. Give the texts that were read, or none."
            )
        names.append((prompts.ids[0].cpu().numpy(), prompts.tokens[0]))
    return names
