"""Corpora: texts of a local file, of a data set on the Hugging Face hub, or as they ship."""

import json
import random
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from cw_lens.errors import CWLensError, CWLensWarning, InputError
from cw_lens.model_paths import first_line, hub_silence
from cw_lens.prompts import Prompts, tokenize
from cw_lens.weights import file_sha256

SHIPPED = "samples"
ON_HUB = {  # short names, each with its name:subset:split
    "gsm8k": "openai/gsm8k:main:test",
    "fineweb-edu": "HuggingFaceFW/fineweb-edu:sample-10BT:train",
    "wikitext": "Salesforce/wikitext:wikitext-2-raw-v1:test",
}
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt")
DRAWN_FROM = 10_000  # texts of a stream, beyond those asked for
REMEDY = (
    f'Give "{SHIPPED}" (shipped with cw_lens), {", ".join(ON_HUB)}, the path of a file that ends '
    f'in {", ".join(SUFFIXES)}, or a name on the hub as "org/name:subset:split".'
)

_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([^:]*))?(?::([^:]*))?")
_TITLE = re.compile(r" = [^=].* = \n?")  # of a WikiText article; " = = " begins a section
_Numbered = Iterator[tuple[int, str]]


class CorpusError(InputError):
    """A corpus that cannot be read or used; the message says what to do."""


class ShortCorpusWarning(CWLensWarning):
    """A corpus has fewer texts than were asked for."""


@dataclass(frozen=True)
class Corpus:
    """Texts and where they come from.

    Attributes:
        name: as it was asked for.
        texts: none of them blank.
        source: a file and its sha256, or name, subset, split and revision on the hub.
        rows: for each text, the number from 0 of the row, or line, at which it begins.
    """

    name: str
    texts: tuple[str, ...]
    source: str
    rows: tuple[int, ...]


def load_corpus(
    data: str | Path,
    examples: int | None = None,
    *,
    field: str | None = None,
    sample_seed: int | None = None,
) -> Corpus:
    """The texts of a corpus, blank ones left out.

    A row with a question and an answer becomes "Question: ..." and a line "Answer: ...". Of any
    other the text is its column `text`, or else its only column of strings. A text file is split
    at blank lines; WikiText, whether a file or rows, into its articles.

    Args:
        data: "samples", "gsm8k", "fineweb-edu" or "wikitext"; the path of a .jsonl, .json,
            .parquet, .csv or .txt file; or a hub name as "org/name:subset:split", where the last
            parts may be left out or empty. The split is then test, validation or train.
        examples: how many texts; None takes all that a file has.
        field: the column that holds the text, whatever else there is.
        sample_seed: draws the texts at random, in the order of the source, instead of taking the
            first. A stream from the hub is drawn from its first 10,000 texts and `examples`.

    Raises:
        CorpusError: nothing by that name, a file or data set that cannot be read, rows whose text
            cannot be told, no text at all, or `examples` below 1 or needed and not given.

    Warns:
        ShortCorpusWarning: when there are fewer texts than `examples`; all are taken.
    """
    data = str(data)
    if examples is not None and (not isinstance(examples, int) or not 1 <= examples < 1 << 60):
        raise CorpusError(f"examples is {examples!r}; it must be a whole number from 1.")
    with _reading(data):
        place = _place(data)
        if isinstance(place, Path):
            kept = "shipped with cw_lens" if data == SHIPPED else place
            source, rows = f"{kept}, sha256 {file_sha256(place)}", _file_rows(place)
        elif examples is None:
            raise CorpusError(
                f"{data} is a stream from the Hugging Face hub, so it is not taken whole. Say how "
                "many texts to take, with examples=100 (--examples 100)."
            )
        else:
            source, rows = _hub_rows(*place.groups())
        texts = _texts(rows, field, data)
        found = _taken(texts, examples, sample_seed, not isinstance(place, Path))
    if not found:
        raise CorpusError(f"{data} holds no text: it has no rows, or all are blank. {REMEDY}")
    if examples is not None and len(found) < examples:
        warnings.warn(
            f"{data} holds {len(found)} texts and {examples} were asked for; all are taken.",
            ShortCorpusWarning,
            stacklevel=2,
        )
    numbers, taken = zip(*found, strict=True)
    name = place.stem if isinstance(place, Path) else data
    return Corpus(name=name, texts=taken, source=source, rows=numbers)


def corpus_prompts(model: Any, text: str, max_tokens: int) -> Prompts:
    """One text as a batch of one: its first `max_tokens` tokens or fewer, BOS included.

    Raises:
        CorpusError: `max_tokens` below 2.
        PromptError: as `tokenize`, which also warns.
    """
    if not isinstance(text, str):
        raise CorpusError(f"the text is a {type(text).__name__}; give one text at a time.")
    if not isinstance(max_tokens, int) or max_tokens < 2:
        raise CorpusError(f"max_tokens is {max_tokens!r}; it must be at least 2, to predict one.")
    whole, cut = tokenize(model, text, truncate=True), slice(max_tokens)
    return replace(
        whole, ids=whole.ids[:, cut], mask=whole.mask[:, cut], tokens=(whole.tokens[0][cut],)
    )


@contextmanager
def _reading(data: str) -> Iterator[None]:
    """What a reader raises inside becomes one message."""
    try:
        yield
    except CWLensError:
        raise
    except Exception as error:
        reason = first_line(error)
        if isinstance(error, UnicodeDecodeError):
            reason = f"it is not UTF-8 ({error.reason}); save it in UTF-8."
        elif reason.startswith("Config name is missing"):  # the next line names the subsets
            reason += f" {str(error).splitlines()[1]}."
        raise CorpusError(f"cannot read {data}: {reason} {REMEDY}") from error


def _place(data: str) -> Path | re.Match[str]:
    """The file that is meant, or the name, subset and split on the hub."""
    if data == SHIPPED:
        return Path(str(resources.files("cw_lens") / "data" / "samples.jsonl"))
    path = Path(data).expanduser()
    known = path.suffix.lower() in SUFFIXES
    if data not in ON_HUB and path.exists():
        if path.is_file() and known:
            return path
        raise CorpusError(
            f"{data} is {'a folder' if path.is_dir() else 'a file of no known kind'}. Give a file "
            f"whose name ends, by what it holds, in {', '.join(SUFFIXES)}."
        )
    named = _HUB_NAME.fullmatch(ON_HUB.get(data, data))
    if named is None or known or data.startswith("."):
        raise CorpusError(f"there is no file or data set {data!r}. {REMEDY}")
    return named


def _taken(
    texts: _Numbered, examples: int | None, seed: int | None, stream: bool
) -> list[tuple[int, str]]:
    if examples is None or seed is None:
        return list(islice(texts, examples))
    pool = list(islice(texts, examples + DRAWN_FROM) if stream else texts)
    drawn = random.Random(seed).sample(range(len(pool)), min(examples, len(pool)))
    return [pool[index] for index in sorted(drawn)]


def _file_rows(path: Path) -> Iterator[Any]:
    """The rows of a file: dictionaries, strings, or whatever else its JSON holds."""
    import pandas as pd
    import pyarrow.parquet as pq

    suffix = path.suffix.lower()
    if suffix == ".parquet":
        with pq.ParquetFile(path) as table:
            yield from chain.from_iterable(part.to_pylist() for part in table.iter_batches())
    elif suffix == ".csv":  # no guessing of types: "NA" and "007" are texts
        with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
            table = pd.read_csv(
                path, dtype=str, keep_default_na=False, encoding="utf-8-sig", index_col=False
            )
        yield from table.to_dict("records")
    else:
        with path.open(encoding="utf-8-sig") as file:
            whole = file.read() if suffix == ".json" else ""
            if whole.lstrip().startswith("["):
                yield from json.loads(whole)
            elif suffix == ".txt":
                yield from file
            else:
                yield from _json_lines(whole.split("\n") if whole else file, path)


def _json_lines(lines: Iterable[str], path: Path) -> Iterator[Any]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise CorpusError(
                    f"{path}, line {number} is not JSON: {first_line(error)} Each line must be a "
                    'row such as {"text": "..."}; a .json file may instead be one list of rows.'
                ) from error


def _hub_rows(name: str, subset: str | None, split: str | None) -> tuple[str, Iterable[Any]]:
    """What to record of a data set on the hub, and the rows of its split as they arrive."""
    from huggingface_hub import is_offline_mode

    if not is_offline_mode() and (silence := hub_silence(name)):
        raise CorpusError(
            f"cannot read {name}, as the Hugging Face hub does not answer: {silence} Connect to "
            f"it, or set HF_HUB_OFFLINE=1 to use what was downloaded before. {REMEDY}"
        )
    from datasets import load_dataset_builder

    builder = load_dataset_builder(name, subset or None)  # load_dataset hides the revision
    streams: Any = builder.as_streaming_dataset()
    if not split:
        split = next(iter([s for s in ("test", "validation", "train") if s in streams] or streams))
    elif split not in streams:
        raise CorpusError(f"{name} has no split {split!r}; it has {', '.join(streams)}.")
    return f"{name}:{builder.config.name}:{split}, revision {builder.hash}", streams[split]


def _texts(rows: Iterable[Any], field: str | None, data: str) -> _Numbered:
    """The texts that rows hold, each with the number of the row where it begins."""
    lines = ((n, _row_text(row, field, f"row {n} of {data}")) for n, row in enumerate(rows))
    begin = []  # to the first that is not blank
    for number, line in lines:
        begin.append((number, line))
        if line.strip():
            break
    texts = chain(begin, lines)
    if begin and _TITLE.fullmatch(begin[-1][1]):
        texts = _articles(texts)
    elif data.lower().endswith(".txt"):
        texts = _paragraphs(texts)
    for number, text in texts:
        if text.strip():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise CorpusError(
                    f"row {number} of {data} is no text ({error.reason}). Mend or remove the row."
                ) from error
            yield number, text


def _row_text(row: Any, field: str | None, where: str) -> str:
    if field is None and isinstance(row, str):
        return row
    if not isinstance(row, dict):
        raise CorpusError(
            f"{where} is a {type(row).__name__} without columns. Leave out field (--field) for "
            "plain texts, or make each row an object."
        )
    question, answer = row.get("question"), row.get("answer")
    if field is None and isinstance(question, str) and isinstance(answer, str):
        return f"Question: {question}\nAnswer: {answer}"
    columns = [name for name, value in row.items() if isinstance(value, str | None)]
    if field is None:
        field = "text" if "text" in row or len(columns) != 1 else columns[0]
    if field in row and field not in columns:
        raise CorpusError(
            f"{where} holds a {type(row[field]).__name__} in its column {field!r}, no text. Name "
            "another with field=... (--field), or mend the row."
        )
    if field not in columns:
        raise CorpusError(
            f"{where} has no text in a column {field!r}; its columns are "
            f"{', '.join(row) or 'none'}. Name the one that holds the text with field=... "
            "(--field)."
        )
    return row[field] or ""


def _paragraphs(lines: _Numbered) -> _Numbered:
    for blank, group in groupby(lines, key=lambda numbered: not numbered[1].strip()):
        if not blank:
            yield _joined(list(group))


def _articles(lines: _Numbered) -> _Numbered:
    """WikiText's articles; a title stands between blank lines, as a formula's " = " does not."""
    held: list[tuple[int, str]] = []
    for number, line in lines:
        ends = not line.strip() and len(held) > 1 and not held[-2][1].strip()
        if ends and _TITLE.fullmatch(held[-1][1]):
            yield _joined(held[:-1])
            held = held[-1:]
        held.append((number, line))
    yield _joined(held)


def _joined(lines: list[tuple[int, str]]) -> tuple[int, str]:
    """One text of lines, without the blank ones before and after."""
    start = next((number for number, line in lines if line.strip()), 0)
    text = "\n".join(line.rstrip("\n") if line.strip() else "" for _, line in lines)
    return start, text.strip("\n")
