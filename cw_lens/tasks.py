"""Benchmark tasks with the prompts and the scoring of lm-evaluation-harness itself, zero-shot.

Its own task definitions make every string that a model is asked, and its own code scores the
answers. Rows come from the Hugging Face hub or from a local file.
"""

import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from cw_lens.corpora import ShortCorpusWarning
from cw_lens.model_paths import first_line, hub_silence
from cw_lens.task_rows import TASKS, Row, TaskError, file_rows
from cw_lens.weights import file_sha256
from cw_lens.wrapping import quiet

Loglikelihood = tuple[float, bool]
"""Log-probability of a continuation in nats, and whether each of its tokens is the likeliest."""

_SPLITS = ("train", "validation", "test", "dev")  # the harness reads those that its task names


@dataclass(frozen=True, eq=False)
class Item:
    """One question of a task.

    Attributes:
        example: number of its row from 0: of the local file, blank lines left out, or of the
            evaluated split on the hub, for MMLU the subjects' splits one after the other.
        requests: context and continuation of each choice; of LAMBADA there is one, the last word.
        gold: which of the requests is right.
        harness: lm-evaluation-harness' task, which scores.
        document: its row, as the harness sees it.
    """

    example: int
    requests: tuple[tuple[str, str], ...]
    gold: int
    harness: Any = field(repr=False)
    document: Mapping[str, Any] = field(repr=False)

    def score(self, loglikelihoods: Sequence[Loglikelihood]) -> dict[str, float]:
        """The metrics that the harness computes, `acc` among them: 1 where the answer is right.

        Of several choices the likeliest must be the right one; the last word of LAMBADA must be
        what greedy decoding gives.

        Args:
            loglikelihoods: of each request, in order.
        """
        return dict(self.harness.process_results(self.document, list(loglikelihoods)))


@dataclass(frozen=True, eq=False)
class Task:
    """Questions and where they come from.

    Attributes:
        name: one of `TASKS`.
        items: by rising example.
        source: the file and its sha256, or the data set on the hub.
        harness: version of lm-evaluation-harness, and of its definition of the task.
    """

    name: str
    items: tuple[Item, ...]
    source: str
    harness: str


def load_task(
    name: str,
    rows: str | Path | None = None,
    examples: int | None = None,
    *,
    sample_seed: int | None = 0,
) -> Task:
    """A task's questions, as lm-evaluation-harness puts them, without examples before them.

    A local file holds one JSON object a line:

        mmlu: question, choices (four), answer (0 to 3), subject, such as "college_physics"
        winogrande: sentence (with one _), option1, option2, answer (1 or 2)
        boolq: passage, question, answer (true or false)
        lambada: text (its last word is asked for)

    Args:
        name: one of `TASKS`.
        rows: a local .jsonl file; None reads the harness' own data set from the hub.
        examples: how many questions; None takes all.
        sample_seed: draws the questions at random, in the order of the source; None takes the
            first, which in MMLU are of one subject.

    Raises:
        TaskError: lm-evaluation-harness is not installed, no task by that name, a file that
            cannot be read or is empty, a row that lacks a field or holds a wrong one, a data set
            that the hub does not give, or `examples` below 1.

    Warns:
        ShortCorpusWarning: when there are fewer rows than `examples`; all are taken.
    """
    if name not in TASKS:
        raise TaskError(f"there is no task {name!r}; there are {', '.join(TASKS)}.")
    if examples is not None and examples < 1:
        raise TaskError(f"examples is {examples}; it must be at least 1.")
    _require_harness()
    if rows is None:
        source, found = _hub_items(name, examples, sample_seed)
    else:
        path = Path(rows).expanduser()
        read = list(file_rows(name, path))
        source = f"{path}, sha256 {file_sha256(path)}"
        found = _local_items(name, read, _drawn(name, len(read), examples, sample_seed))
    defined = found[0].harness.VERSION
    harness = f"lm_eval {version('lm_eval')}, {TASKS[name].whole} {defined}"
    items = tuple(sorted(found, key=lambda item: item.example))
    return Task(name=name, items=items, source=source, harness=harness)


def _local_items(name: str, rows: Sequence[Row], drawn: Sequence[int]) -> list[Item]:
    from datasets import Dataset

    by_name: dict[str, list[int]] = {}
    for number in drawn:
        by_name.setdefault(TASKS[name].of_row.format_map(rows[number]), []).append(number)
    members = []
    for harness_name, numbers in by_name.items():
        data = Dataset.from_list([rows[number] for number in numbers])
        splits = dict.fromkeys(_SPLITS, data)
        members.append({"task": harness_name, "custom_dataset": lambda splits=splits, **_: splits})
    tasks = _harness_tasks(name, members)
    return [
        item
        for harness_name, numbers in by_name.items()
        for item in _items(tasks[harness_name], numbers, None)
    ]


def _hub_items(name: str, examples: int | None, seed: int | None) -> tuple[str, list[Item]]:
    from huggingface_hub import is_offline_mode

    silence = None if is_offline_mode() else hub_silence(TASKS[name].whole)
    remedy = (
        "Connect to it, set HF_HUB_OFFLINE=1 to use what was downloaded before, or give them as "
        f"a local file, with rows=... (--rows {name}=FILE.jsonl)."
    )
    if silence is not None:
        raise TaskError(f"the Hugging Face hub did not give the rows of {name}: {silence} {remedy}")
    try:
        with quiet():
            tasks = list(_manager(name).load([TASKS[name].whole])["tasks"].values())
    except Exception as error:
        raise TaskError(
            f"the Hugging Face hub did not give the rows of {name}: {first_line(error)} {remedy}"
        ) from error
    lengths = [len(task.eval_docs) for task in tasks]
    drawn = _drawn(name, sum(lengths), examples, seed)
    found, start = [], 0
    for task, length in zip(tasks, lengths, strict=True):
        numbers = [number for number in drawn if start <= number < start + length]
        if numbers:
            found += _items(task, numbers, [number - start for number in numbers])
        start += length
    return f"{tasks[0].DATASET_PATH} on the Hugging Face hub", found


def _items(task: Any, numbers: Sequence[int], documents: list[int] | None) -> list[Item]:
    """The questions of one of the harness' tasks; all of its documents, or those listed."""
    with quiet():
        task.build_all_requests(samples=documents)
    groups = groupby(task.instances, key=lambda request: request.doc_id)
    items = []
    for number, (_, group) in zip(numbers, groups, strict=True):
        requests = list(group)
        document = requests[0].doc
        gold = 0
        if len(requests) > 1:
            gold = (
                task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
            )
        pairs = tuple(request.args for request in requests)
        items.append(Item(number, pairs, int(gold), task, document))
    return items


def _drawn(name: str, rows: int, examples: int | None, seed: int | None) -> Sequence[int]:
    if examples is not None and examples > rows:
        warnings.warn(
            f"{name} has {rows} rows and {examples} were asked for; all are taken.",
            ShortCorpusWarning,
            stacklevel=4,
        )
    if examples is None or examples >= rows:
        return range(rows)
    return (
        range(examples)
        if seed is None
        else sorted(random.Random(seed).sample(range(rows), examples))
    )


def _require_harness() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise TaskError(
            f"the tasks need lm-evaluation-harness ({first_line(error)}). Install it with "
            "pip install 'cw-lens[tasks]'."
        ) from error


def _harness_tasks(name: str, members: list[dict[str, Any]]) -> dict[str, Any]:
    """The harness' tasks by name, from its own definitions and what members change in them."""
    manager = _manager(name)
    for member in members:
        if member["task"] not in manager.all_tasks:
            raise TaskError(
                f"lm-evaluation-harness has no task {member['task']!r}. Correct the subject in "
                f"the rows; there are {', '.join(manager.all_subtasks)}."
            )
    with quiet():  # in a group, and there alone, members may change a definition
        return manager.load([{"group": f"cw_lens_{name}", "task": members}])["tasks"]


def _manager(name: str) -> Any:
    """What loads the harness' definitions; it knows those of this task alone, which is fast."""
    import lm_eval.tasks

    folder = Path(lm_eval.tasks.__file__).parent / TASKS[name].folder
    return lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
