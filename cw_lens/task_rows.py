"""Local rows of the benchmark tasks, checked, in the form of the data sets on the hub."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cw_lens.errors import InputError
from cw_lens.model_paths import first_line

Row = dict[str, Any]

_LETTERS = 4  # of the answers in MMLU


class TaskError(InputError):
    """A task that cannot be loaded, or a row that it cannot use; the message says what to do."""


def file_rows(name: str, path: Path) -> Iterator[Row]:
    """The rows of a local file, each as the data set on the hub would hold it.

    Args:
        name: of the task, one of `TASKS`.
        path: of a .jsonl file.

    Raises:
        TaskError: naming the file, and the line that is wrong and why.
    """
    if not path.is_file():
        raise TaskError(f"there is no file {path}. Give the rows of {name} as a .jsonl file.")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot read {path}: {first_line(error)} Save it in UTF-8.") from error
    empty = True
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        empty = False
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise _RowError(f"is a {type(row).__name__}, no object")
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no text
            yield TASKS[name].hub_row(row)
        except (ValueError, RecursionError, _RowError) as error:  # of JSON, in all its forms
            said = error if isinstance(error, _RowError) else f"is not JSON ({first_line(error)})"
            raise TaskError(
                f"{path}, line {number} {said}. A row of {name} holds {TASKS[name].fields}."
            ) from error
    if empty:
        raise TaskError(f"{path} holds no rows. A row of {name} holds {TASKS[name].fields}.")


class _RowError(Exception):
    """What is wrong with a row; its line is added where that is known."""


def _text(row: Row, name: str) -> str:
    value = _present(row, name)
    if not isinstance(value, str) or not value.strip():
        raise _RowError(f"has a {name} that is no text: {value!r}")
    return value


def _present(row: Row, name: str) -> Any:
    if name not in row:
        raise _RowError(f"has no {name}")
    return row[name]


def _answer(row: Row, allowed: Sequence[Any]) -> Any:
    """The answer, where it is one of those allowed and of their type: true is not 1."""
    answer = _present(row, "answer")
    if not any(answer == value and type(answer) is type(value) for value in allowed):
        raise _RowError(
            f"has the answer {answer!r}; it must be one of {', '.join(map(str, allowed))}"
        )
    return answer


def _mmlu_row(row: Row) -> Row:
    choices = _present(row, "choices")
    if (
        not isinstance(choices, list)
        or len(choices) != _LETTERS
        or not all(isinstance(choice, str) for choice in choices)
    ):
        raise _RowError(f"has choices that are not {_LETTERS} texts: {choices!r}")
    question, subject = _text(row, "question"), _text(row, "subject")
    answer = _answer(row, range(_LETTERS))
    return {"question": question, "subject": subject, "choices": choices, "answer": answer}


def _winogrande_row(row: Row) -> Row:
    sentence = _text(row, "sentence")
    if sentence.count("_") != 1:
        raise _RowError(f"has a sentence with {sentence.count('_')} blanks (_) instead of one")
    options = {name: _text(row, name) for name in ("option1", "option2")}
    return {"sentence": sentence, **options, "answer": str(_answer(row, (1, 2)))}


def _boolq_row(row: Row) -> Row:
    texts = {name: _text(row, name) for name in ("passage", "question")}
    return {**texts, "label": int(_answer(row, (True, False)))}


def _lambada_row(row: Row) -> Row:
    return {"text": _text(row, "text")}


@dataclass(frozen=True)
class Definition:
    """Where the harness defines a task, and how a local row becomes one of its own.

    Attributes:
        folder: of the definitions, in the harness' folder of tasks.
        whole: the harness' name of all of it.
        of_row: the harness' task that a row belongs to, to be filled in with the row's fields.
        fields: of a local row, in words.
        hub_row: a local row, checked, as the data set on the hub would hold it.
    """

    folder: str
    whole: str
    of_row: str
    fields: str
    hub_row: Callable[[Row], Row]


TASKS = {
    "mmlu": Definition(
        folder="mmlu/default",
        whole="mmlu",
        of_row="mmlu_{subject}",
        fields="question, choices (four), answer (0 to 3) and subject",
        hub_row=_mmlu_row,
    ),
    "winogrande": Definition(
        folder="winogrande",
        whole="winogrande",
        of_row="winogrande",
        fields="sentence (with one _), option1, option2 and answer (1 or 2)",
        hub_row=_winogrande_row,
    ),
    "boolq": Definition(
        folder="super_glue/boolq",
        whole="boolq",
        of_row="boolq",
        fields="passage, question and answer (true or false)",
        hub_row=_boolq_row,
    ),
    "lambada": Definition(
        folder="lambada",
        whole="lambada_openai",
        of_row="lambada_openai",
        fields="text",
        hub_row=_lambada_row,
    ),
}
"""The tasks by name, each with how lm-evaluation-harness defines it."""
