"""Passes over a corpus whose readings and losses are kept, for the commands about sinks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cw_lens.cli.corpus_texts import kept, require_same_ground

if TYPE_CHECKING:
    from cw_lens.store import UnitStore
    from cw_lens.studies.losses import StudyText
    from cw_lens.studies.readings import LayerStudy, TextReading

KEPT = "kept"
"""The folder, inside the run's, of what is kept while it runs."""


@contextmanager
def opened_stores(
    folder: Path, configuration: Mapping[str, Any], columns: Mapping[str, Mapping[str, type]]
) -> Iterator[dict[str, "UnitStore"]]:
    """One store for each name, each in its own folder, closed together.

    Raises:
        StoreError, RunFolderError: as `opened_store`.
    """
    from cw_lens.folders import made_folder
    from cw_lens.store import opened_store

    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                opened_store(made_folder(folder / KEPT / name), configuration, held)
            )
            for name, held in columns.items()
        }


def ground_all(
    stores: Mapping[str, "UnitStore"], corpora: Sequence[Any], facts: Mapping[str, Any]
) -> None:
    """Holds every store to the texts, weights and versions of the run.

    Raises:
        StoreError: naming what differs.
    """
    for store in stores.values():
        require_same_ground(store, [c.source for c in corpora], facts["model"]["weight_hash"])


def kept_pass(
    store: "UnitStore",
    model: Any,
    texts: Sequence["StudyText"],
    studies: Mapping[str, "LayerStudy"],
    **options: Any,
) -> list["TextReading"]:
    """The readings of all texts, those that were kept among them."""
    from cw_lens.studies.readings import kept_readings, reading_units

    def run(done: set[int]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        yield from reading_units(model, texts, studies, done, **options)

    kept(store, run, len(texts), "reading")
    return kept_readings(store.table())


def kept_rerun(
    store: "UnitStore",
    model: Any,
    texts: Sequence["StudyText"],
    readings: Sequence["TextReading"],
    layers: Sequence[int],
    **options: Any,
) -> list["TextReading"]:
    """The readings of a second pass without the sink, those that were kept among them."""
    from cw_lens.studies.readings import kept_readings
    from cw_lens.studies.sinks import rerun_units

    run = rerun_units(model, texts, readings, layers, **options)
    kept(store, run, len(texts), "reading without the sink")
    return kept_readings(store.table())
