"""A study that runs each text under many conditions, batch by batch, and can be taken up again."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, TypeVar

from cw_lens.studies.losses import Clean, StudyText, clean_predictions

Condition = TypeVar("Condition")
Units = list[dict[str, Any]]
"""One row for each condition of a batch."""


class TextBatches(ABC, Generic[Condition]):
    """The units of batches of conditions on a list of texts.

    Batches are the same however often a run is cut off and resumed, so that its numbers are too.

    Attributes:
        model: what runs.
        texts: each a batch of one.
    """

    model: Any
    texts: Sequence[StudyText]

    @abstractmethod
    def batches_of(self, text: StudyText) -> Sequence[Sequence[Condition]]:
        """The conditions of a text that run together, batch after batch."""

    @abstractmethod
    def units_of(self, text: StudyText, clean: Clean) -> Callable[[Sequence[Condition]], Units]:
        """What gives the units of one batch after the other of a text."""

    @property
    def n_batches(self) -> int:
        """Number of batches of the whole study."""
        return sum(len(self.batches_of(text)) for text in self.texts)

    def run(self, done: Collection[int] = ()) -> Iterator[tuple[int, Units]]:
        """Each batch that is not done yet: its number and its units."""
        first = 0
        for text in self.texts:
            batches = self.batches_of(text)
            missing = [at for at in range(len(batches)) if first + at not in done]
            if missing:
                units = self.units_of(text, clean_predictions(self.model, text.prompts))
                for at in missing:
                    yield first + at, units(batches[at])
            first += len(batches)
