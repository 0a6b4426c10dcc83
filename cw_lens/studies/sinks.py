"""Everything about sinks from one pass over a corpus, one without the sink, and a sweep (SPEC 8).

`SINK_STUDIES` are read together. The layers in which the sink is then scaled are those that the
first pass shows to be sink layers. `sink_profile` and `sink_sweep` do it for prompts in memory.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cw_lens.errors import InputError, spans
from cw_lens.interventions import scaled_values
from cw_lens.prompts import Prompts, one_by_one
from cw_lens.runs import layer_indices, require_prompts
from cw_lens.studies.alignment import Alignment, alignment, layer_alignment
from cw_lens.studies.cone import Cone, cone, cone_points, layer_cone, outputs_in_frames
from cw_lens.studies.losses import StudyText
from cw_lens.studies.norm_model import NormModel, layer_head_norms, norm_model, norm_points
from cw_lens.studies.readings import (
    LayerStudy,
    TextReading,
    by_corpus,
    kept_readings,
    read_texts,
    reading_units,
)
from cw_lens.studies.sink_counts import (
    SINK_LAYER_ATTENTION,
    SinkCounts,
    layer_sinks,
    sink_counts,
    sink_layers,
)
from cw_lens.studies.sweeps import FACTORS, UNIT_COLUMNS, Sweep, sweep_conditions

SINK_STUDIES: dict[str, LayerStudy] = {
    "sinks": layer_sinks,
    "alignment": layer_alignment,
    "norm_model": layer_head_norms,
    "cone": layer_cone,
}
"""What one pass reads for `sink_profiles`, by the names under which it looks for them."""


@dataclass(frozen=True, eq=False)
class SinkProfile:
    """What the sinks of one corpus are like.

    Attributes:
        data: the corpus.
        readings, reruns: those it was made of.
        counts, alignment, norms, cone: the result of each study.
    """

    data: str
    readings: Sequence[TextReading]
    reruns: Sequence[TextReading]
    counts: SinkCounts
    alignment: Alignment
    norms: NormModel
    cone: Cone

    def norm_points(self, layer: int, head: int) -> pd.DataFrame:
        """Figure 5b: one row per text and query of one head, as `norm_figure` takes them.

        `attention` to the first key, `norm` of the head's output, measured, and `predicted`.

        Raises:
            InputError: a layer or head that was not read.
        """
        return norm_points(self.readings, self.norms, layer, head)

    def cone_points(self, layer: int, head: int) -> pd.DataFrame:
        """Figure 6a: one row per text and query of one head, as `cone_figure` takes them.

        `x` and `y` of the head's output along mu and u, `x_without` and `y_without` the sink's
        term, `norm`, `attention` to the first key, and whether it is of the `low`-norm quarter.

        Raises:
            InputError: a layer or head that was not read.
        """
        return cone_points(self.readings, layer, head)


def sink_profile(
    model: Any,
    prompts: Prompts,
    *,
    layers: Sequence[int] | None = None,
    space: str = "residual",
    allow_folded: bool = False,
) -> SinkProfile:
    """What the sinks of these texts are like: counts, alignment, norm model and cone.

    Two passes over each text: one that reads every layer, and one with the first token's value
    scaled to 0 throughout, for what the cone then holds.

    Args:
        model: a decoder of TransformerLens, or what `load_model` and `wrap_model` return.
        prompts: from `tokenize`; each example is a text, run without its padding.
        layers: where the second pass scales the value; by default the sink layers, those whose
            mean attention to the first token is above 0.3.
        space, allow_folded: as `capture`.

    Raises:
        InputError: a layer that the model does not have, or no sink layer and none named; and as
            `capture`.
        IdentityError, UnsupportedModelError: as `capture`.
    """
    require_prompts(model, prompts)
    named = None if layers is None else layer_indices(model, layers)
    texts = _as_texts(prompts)
    options: dict[str, Any] = {"space": space, "allow_folded": allow_folded}
    readings = list(read_texts(model, texts, SINK_STUDIES, **options))
    where = found_sink_layers(readings) if named is None else named
    again = rerun_units(model, texts, readings, where, **options)(())
    reruns = kept_readings(pd.DataFrame([unit for _, units in again for unit in units]))
    return sink_profiles(readings, reruns, texts)[0]


def sink_sweep(
    model: Any,
    prompts: Prompts,
    layers: Sequence[int],
    factors: Sequence[float] = FACTORS,
    *,
    detector: str = "cosine",
    progress: Callable[[int, int], None] | None = None,
    batch_size: int = 8,
    space: str = "residual",
    allow_folded: bool = False,
    **conditions: Any,
) -> pd.DataFrame:
    """One row for each run of a text with its sinks' values edited; `sweep_curves` reads it.

    The values at the first token, and at all sinks, are scaled by each factor, beside a control
    token scaled alike and a random vector as long; and they are cut or replaced (surgery).

    Args:
        model: a decoder of TransformerLens, or what `load_model` and `wrap_model` return.
        prompts: from `tokenize`; each example is a text, run without its padding.
        layers: those in which values are edited, all at once.
        factors: what values are multiplied by (paper, figure 6c).
        detector: which keys are sinks: targets, left out of means, and never a control.
        progress: called with the number of batches done, and of all, after each.
        batch_size: edits of one text that run at a time.
        space, allow_folded: as `capture`.
        conditions: targets, surgery and seeds, as `sweep_conditions`.

    Returns:
        The columns of `UNIT_COLUMNS`; `data` is "prompts", `example` the row.

    Raises:
        InputError, UnsupportedModelError: as `sweep_conditions`, `Sweep` and `capture`.
    """
    require_prompts(model, prompts)
    sweep = Sweep(
        model,
        _as_texts(prompts),
        layers,
        sweep_conditions(factors, **conditions),
        detector=detector,
        batch_size=batch_size,
        space=space,
        allow_folded=allow_folded,
    )
    units = []
    for done, (_batch, found) in enumerate(sweep.run(), start=1):
        units += found
        if progress is not None:
            progress(done, sweep.n_batches)
    return pd.DataFrame(units, columns=list(UNIT_COLUMNS))


def _as_texts(prompts: Prompts) -> list[StudyText]:
    return [StudyText("prompts", row, text) for row, text in enumerate(one_by_one(prompts))]


def sink_profiles(
    readings: Sequence[TextReading],
    reruns: Sequence[TextReading] = (),
    texts: Sequence[StudyText] | None = None,
) -> list[SinkProfile]:
    """One profile for each corpus.

    Args:
        readings: of `SINK_STUDIES`.
        reruns: of `rerun_units`, of the same texts; none if there was no second pass.
        texts: those that were read, to name the tokens that are sinks.

    Raises:
        InputError: as the studies.
    """
    again = by_corpus(reruns) if reruns else {}
    profiles = []
    for data, held in by_corpus(readings).items():
        of_corpus = None if texts is None else [text for text in texts if text.data == data]
        profiles.append(
            SinkProfile(
                data=data,
                readings=held,
                reruns=again.get(data, ()),
                counts=sink_counts(held, of_corpus),
                alignment=alignment(held),
                norms=norm_model(held),
                cone=cone(held, again.get(data, ())),
            )
        )
    return profiles


def found_sink_layers(readings: Sequence[TextReading]) -> tuple[int, ...]:
    """The sink layers of a pass.

    Raises:
        InputError: there are none.
    """
    layers = sink_layers(readings)
    if not layers:
        raise InputError(
            f"no layer's mean attention to the first token is above {SINK_LAYER_ATTENTION}: there "
            "is no sink layer to scale the sink in. Name layers with layers=... (--layers)."
        )
    return layers


def require_head(model: Any, head: tuple[int, int] | None) -> None:
    """Refuses a layer and head that the model does not have, before anything is computed.

    Raises:
        InputError: naming what there is.
    """
    if head is None:
        return
    layers, heads = layer_indices(model, None), int(model.cfg.n_heads)
    if head[0] not in layers or not 0 <= head[1] < heads:
        raise InputError(
            f"layer {head[0]}, head {head[1]} does not exist; there are layers "
            f"{spans(layers)} with {heads} heads."
        )


def rerun_units(
    model: Any,
    texts: Sequence[StudyText],
    readings: Sequence[TextReading],
    layers: Sequence[int],
    **options: Any,
) -> Callable[[Collection[int]], Iterator[tuple[int, list[dict[str, Any]]]]]:
    """The units of a second pass, with the first token's value scaled to 0 in these layers.

    What comes back takes the places of the texts already done, and gives, as `reading_units`, the
    outputs in the frames of the first pass, under "rerun".

    Args:
        model, texts, options: as `reading_units`.
        readings: of `layer_cone`, one for each text.
        layers: where the value is scaled.

    Raises:
        InputError: a text that was not read.
    """
    held: Mapping[tuple[str, int], TextReading] = {(r.data, r.example): r for r in readings}
    for text in texts:
        if (text.data, text.example) not in held:
            raise InputError(f"{text.data}, example {text.example} has no reading; read it first.")

    def run(done: Collection[int]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        for place, text in enumerate(texts):
            if place in done:
                continue
            study = {"rerun": outputs_in_frames(held[text.data, text.example])}
            with scaled_values(model, 0.0, positions="first", layers=layers):
                units = next(reading_units(model, [text], study, (), **options))[1]
            yield place, units

    return run
