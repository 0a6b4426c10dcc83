"""The cone that the values lie in, and the sink's value beside it (SPEC 8; paper, figures 6a, 6b).

Per text and head: mu is the normalised mean of the non-sink projected values, s = a mu + b u the
first key's, u a unit vector orthogonal to mu. All vectors are held in d_head: a vector p stands for
p W_O, and <p W_O, q W_O> = p^T G q.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from cw_lens.errors import InputError, require_known, spans
from cw_lens.layer import LayerAttention
from cw_lens.sinks import SINK_DETECTORS
from cw_lens.studies.alignment import mean_tables, text_values, texts_together, with_counts
from cw_lens.studies.readings import LayerStudy, TextReading, joined

_VANISHED = 1e-6  # a vector shorter than this share of what it is the rest of is rounding
_EDGE = 1e-3  # degrees: a value on the cone's edge lies inside, whatever its rounding
_MEANS = ("a", "b", "sink_norm", "cone_angle", "inside", "inside_without")


@dataclass(frozen=True, eq=False)
class Cone:
    """Where the sink's value and the shortest outputs lie, averaged over texts.

    Each number has its interval over texts in `_low` and `_high`, and in `_n` the texts where it
    is defined. Lengths are in units of the residual stream.

    Attributes:
        heads: one row per layer and head: `a`, `b` and `sink_norm` = sqrt(a^2 + b^2) of the first
            key's value; `cone_angle` in degrees; `inside`, the share of low-norm outputs whose
            angle to mu is at most the cone's, `inside_without`, that once alpha s is taken from
            each, and `without_gain`, the second minus the first; with a second pass also
            `inside_rerun` and `rerun_gain`; `left_out`, non-sink values of length 0, and `texts`.
        layers: one row per layer, of the same numbers averaged over the heads of each text.
    """

    heads: pd.DataFrame
    layers: pd.DataFrame


def layer_cone(
    layer: LayerAttention, *, share: float = 0.9, sinks: str = "cosine"
) -> dict[str, Shaped[Tensor, "*shape"]]:
    """The frame of each head in one text, and where its outputs lie in it.

    `a`, `b`, `sink_norm`, `cone_angle` (degrees), `inside`, `inside_without` and `left_out` are
    [head], as in `Cone`; `mu` and `u` the frame, [head, d_head]. For the queries after the first,
    [head, query]: `x` = <o, mu>, `y` = <o, u>, `norm` = ||o||, `attention` to the first key, so
    that x - a attention and y - b attention are without the sink; `low`, the quarter of queries
    with the shortest outputs, rounded down, ties to the earlier. `digest` tells the text.

    All that rests on mu is NaN where no value is a non-sink or their mean vanishes, the shares also
    for fewer than four queries. u and y are 0 where s is parallel to mu. Outputs of length 0 have
    no angle and are in no share; one within a thousandth of a degree of the edge is inside.

    Args:
        layer: one text.
        share: of the non-sink values that the cone holds: its angle is the smallest that holds
            at least so many.
        sinks: the detector out of `SINK_DETECTORS` whose sinks, and the first key, are left out
            of mu and the cone.

    Raises:
        InputError: a share outside (0, 1], an unknown detector, and as `text_values`.
        UnsupportedModelError: as `text_values`.
    """
    if not 0 < share <= 1:
        raise InputError(f"share is {share}; it is what the cone holds, above 0 up to 1.")
    require_known("detector", sinks, SINK_DETECTORS)
    value, gram = text_values(layer)
    others = ~SINK_DETECTORS[sinks](layer)[0]
    others[:, 0] = False
    norm = _length(value, gram)
    counted = others & (norm > 0)
    total = (value * others[..., None]).sum(dim=1, keepdim=True)
    size = _length(total, gram)
    seen = size > _VANISHED * (norm * others).sum(dim=-1, keepdim=True)
    mu = torch.where(seen, total[:, 0] / size, torch.nan)
    first, sink_norm = value[:, :1], norm[:, :1]
    a = _along(first, mu, gram)
    beside = first - a[..., None] * mu[:, None]
    b = _length(beside, gram)
    u = torch.where(b <= _VANISHED * sink_norm, 0.0, beside[:, 0] / b)
    angle = _angle(_along(value, mu, gram), norm).masked_fill(~counted, torch.inf)
    held = (counted.sum(dim=-1, keepdim=True) * share - 1e-9).ceil().long()
    cone_angle = angle.sort(dim=-1).values.gather(1, (held - 1).clamp_min(0))
    cone_angle = cone_angle.where(seen, torch.nan)[:, 0]
    outputs = _outputs(layer.z[0, :, 1:].double(), mu, u, gram)
    attention = layer.pattern[0, :, 1:, 0].double()
    rest = (layer.pattern[0, :, 1:, 1:] @ layer.value[0, :, 1:]).double()
    low = _lowest_quarter(outputs["norm"])
    found = {"a": a[:, 0], "b": b[:, 0], "sink_norm": norm[:, 0], "cone_angle": cone_angle}
    found["inside"] = _share_inside(outputs, cone_angle, low)
    found["inside_without"] = _share_inside(_outputs(rest, mu, u, gram), cone_angle, low)
    found |= {"left_out": (others & ~counted).sum(dim=-1), "mu": mu, "u": u, "low": low}
    found |= {name: numbers.float() for name, numbers in outputs.items()}
    return found | {"attention": attention.float(), "digest": layer.prompt_digest[0]}


def outputs_in_frames(clean: TextReading, *, study: str = "cone") -> LayerStudy:
    """A study for a second pass over the same text, read in the frames of the clean one.

    Run it while the sink's value is scaled to 0: `inside`, [head], is the share of the queries that
    were low-norm in the clean pass whose outputs now lie in the clean cone; `x`, `y` and `norm` as
    `layer_cone`.

    Args:
        clean: a reading of `layer_cone`.
        study: the name under which it was read.

    Raises, once it is run:
        InputError: another text, and as `text_values`.
        UnsupportedModelError: as `text_values`.
    """
    held = clean[study]

    def read(layer: LayerAttention) -> dict[str, Float[Tensor, "*shape"]]:
        value, gram = text_values(layer)
        same_text = layer.prompt_digest.tolist() == held["digest"][:1].tolist()
        if layer.index not in clean.layers or not same_text:
            raise InputError(
                f"layer {layer.index} has no frame in {clean.data}, example {clean.example}, of "
                f"layers {spans(clean.layers)}: it is of "
                f"{'a layer not read' if same_text else 'another text'}. Read the same text again."
            )
        place = clean.layers.index(layer.index)
        heads, d_head = len(value), value.shape[-1]  # where layers differ, arrays are filled up
        frame = {
            name: torch.from_numpy(held[name][place][:heads]).to(value.device)
            for name in ("mu", "u", "cone_angle", "low")
        }
        mu, u = frame["mu"][:, :d_head], frame["u"][:, :d_head]
        outputs = _outputs(layer.z[0, :, 1:].double(), mu, u, gram)
        inside = _share_inside(outputs, frame["cone_angle"], frame["low"] == 1)
        return {"inside": inside} | {name: numbers.float() for name, numbers in outputs.items()}

    return read


def cone(
    readings: Sequence[TextReading],
    rerun: Sequence[TextReading] = (),
    *,
    study: str = "cone",
    rerun_study: str = "rerun",
    **options: Any,
) -> Cone:
    """Cones by layer and by head, with intervals over texts.

    Args:
        readings: of `layer_cone`.
        rerun: of `outputs_in_frames`, the same texts and layers, if there is a second pass.
        study, rerun_study: the names under which they were read.
        options: confidence, resamples and seed of the bootstrap, as `bootstrap_means`.

    Raises:
        InputError: no readings, a second pass over other texts or layers, or as `joined` and
            `bootstrap_means`.
    """
    layers, found = texts_together(readings, study, (*_MEANS, "left_out"))
    left_out = found.pop("left_out")
    found["without_gain"] = found["inside_without"] - found["inside"]
    if rerun:
        clean, again = joined(readings), joined(rerun)
        if [_which(text) for text in clean] != [_which(text) for text in again]:
            raise InputError(
                f"the second pass read {len(again)} texts, the first {len(clean)}, and they are "
                "not the same in the same layers. Read every text twice."
            )
        found["inside_rerun"] = texts_together(rerun, rerun_study, ("inside",))[1]["inside"]
        found["rerun_gain"] = found["inside_rerun"] - found["inside"]
    heads, by_layer = mean_tables(layers, found, **options)
    heads = with_counts(heads, left_out=left_out.sum(axis=-1)).assign(texts=len(joined(readings)))
    return Cone(heads, by_layer)


def cone_points(
    readings: Sequence[TextReading], layer: int, head: int, *, study: str = "cone"
) -> pd.DataFrame:
    """Figure 6: one row per text and query of one head, in the plane of mu and u.

    `x` and `y`, those without the sink's term `x_without` and `y_without`, `norm`, `attention` to
    the first key, and whether the output is one of the `low`-norm quarter.

    Raises:
        InputError: no readings, or a layer or head that was not read.
    """
    parts = []
    for text in joined(readings):
        held = text[study]
        if layer not in text.layers or not 0 <= head < held["a"].shape[1]:
            raise InputError(
                f"layer {layer}, head {head} was not read; there are layers "
                f"{spans(text.layers)} with {held['a'].shape[1]} heads at most."
            )
        at = (text.layers.index(layer), head)
        x, y, norm, attention = (
            held[name][at].astype(float) for name in ("x", "y", "norm", "attention")
        )
        columns = {
            "data": text.data,
            "example": text.example,
            "query": 1 + np.arange(len(x)),
            "x": x,
            "y": y,
            "x_without": x - held["a"][at] * attention,
            "y_without": y - held["b"][at] * attention,
            "norm": norm,
            "attention": attention,
            "low": held["low"][at] == 1,
        }
        parts.append(pd.DataFrame(columns))
    if not parts:
        raise InputError(f"there are no readings of {study!r}; read at least one text.")
    return pd.concat(parts, ignore_index=True)


def _length(
    p: Float[Tensor, "head row d_head"], gram: Float[Tensor, "head d_head other"]
) -> Float[Tensor, "head row"]:
    """||p W_O||."""
    return ((p @ gram) * p).sum(dim=-1).clamp_min(0.0).sqrt()


def _along(
    p: Float[Tensor, "head row d_head"],
    q: Float[Tensor, "head d_head"],
    gram: Float[Tensor, "head d_head other"],
) -> Float[Tensor, "head row"]:
    """<p W_O, q W_O>, one q a head."""
    return (p @ gram @ q[..., None]).squeeze(-1)


def _outputs(
    z: Float[Tensor, "head query d_head"],
    mu: Float[Tensor, "head d_head"],
    u: Float[Tensor, "head d_head"],
    gram: Float[Tensor, "head d_head other"],
) -> dict[str, Float[Tensor, "head query"]]:
    """A head's outputs in its plane, and their length."""
    return {"x": _along(z, mu, gram), "y": _along(z, u, gram), "norm": _length(z, gram)}


def _angle(
    along: Float[Tensor, "head row"], norm: Float[Tensor, "head row"]
) -> Float[Tensor, "head row"]:
    """Degrees between vectors and the unit vector that they have these components along."""
    return (along / norm).clamp(-1.0, 1.0).acos().rad2deg()


def _lowest_quarter(norm: Float[Tensor, "head query"]) -> Bool[Tensor, "head query"]:
    """The shortest quarter of each head's outputs, rounded down; ties to the earlier query."""
    rank = norm.argsort(dim=-1, stable=True).argsort(dim=-1)
    return rank < norm.shape[1] // 4


def _share_inside(
    outputs: Mapping[str, Float[Tensor, "head query"]],
    cone_angle: Float[Tensor, " head"],
    low: Bool[Tensor, "head query"],
) -> Float[Tensor, " head"]:
    """Share of the low outputs that lie in the cone; NaN where there is no cone, or none is low."""
    counted = low & (outputs["norm"] > 0)
    inside = _angle(outputs["x"], outputs["norm"]) <= cone_angle[:, None] + _EDGE
    share = (counted & inside).sum(dim=-1) / counted.sum(dim=-1)
    return share.double().where(cone_angle.isfinite(), torch.nan)


def _which(text: TextReading) -> tuple[str, int, tuple[int, ...]]:
    return text.data, text.example, text.layers
