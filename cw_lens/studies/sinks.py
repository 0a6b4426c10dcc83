"""Everything about sinks from one pass over a corpus, one without the sink, and a sweep (SPEC 8).

`SINK_STUDIES` are read together. The layers in which the sink is then scaled are those that the
first pass shows to be sink layers.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cw_lens.errors import InputError, spans
from cw_lens.interventions import scaled_values
from cw_lens.runs import layer_indices
from cw_lens.studies.alignment import Alignment, alignment, layer_alignment
from cw_lens.studies.cone import Cone, cone, layer_cone, outputs_in_frames
from cw_lens.studies.losses import StudyText
from cw_lens.studies.norm_model import NormModel, layer_head_norms, norm_model
from cw_lens.studies.readings import LayerStudy, TextReading, by_corpus, reading_units
from cw_lens.studies.sink_counts import (
    SINK_LAYER_ATTENTION,
    SinkCounts,
    layer_sinks,
    sink_counts,
    sink_layers,
)

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
            "is no sink layer to scale the sink in. Name layers with --layers."
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
