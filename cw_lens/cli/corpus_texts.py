"""What the studies over corpora share on the command line: texts, facts, a store with progress."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cw_lens.cli.console import console, progress_bar
from cw_lens.errors import InputError

if TYPE_CHECKING:
    from cw_lens.corpora import Corpus
    from cw_lens.store import UnitStore
    from cw_lens.studies.losses import StudyText


TAKE_UP = "What was finished is kept: run the same command again to go on."


def configuration_of(command: str, given: dict[str, Any]) -> dict[str, Any]:
    """Everything that was given but where to write, as JSON holds it.

    Args:
        command: its name.
        given: the command's arguments, by name: its `locals()` before anything else.
    """
    kept = {name: value for name, value in given.items() if name != "out"}
    for name, value in given.items():
        for part in value if isinstance(value, tuple) else (value,):
            try:
                str(part).encode()
            except UnicodeEncodeError:
                raise InputError(f"--{name} {str(part)!r} is not UTF-8. Rename the file.") from None
    return {"command": command} | {
        name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()
    }


def require_same_ground(store: "UnitStore", sources: Sequence[Any], weight_hash: str) -> None:
    """Holds a run that is taken up to its texts, weights and versions.

    Raises:
        StoreError: naming what differs.
    """
    from cw_lens.folders import versions

    store.require({"sources": list(sources), "weight_hash": weight_hash})
    store.require(versions("cw-lens", "torch", "transformers", "transformer-lens"))


def recipe() -> str:
    """The command that was given."""
    return shlex.join(["cw-lens", *sys.argv[1:]])


def loaded_corpora(
    data: Sequence[str], examples: int, field: str | None, sample_seed: int | None
) -> list["Corpus"]:
    """The corpora by name, each once.

    Raises:
        InputError: no corpus, or two of one name.
        CorpusError: as `load_corpus`.
    """
    from cw_lens.corpora import load_corpus

    if not data:
        raise InputError("no corpus is named; give --data samples, gsm8k, a file or a hub name.")
    corpora = [load_corpus(d, examples, field=field, sample_seed=sample_seed) for d in data]
    names = [corpus.name for corpus in corpora]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InputError(f"two corpora are named {twice[0]}; rename a file, or run them apart.")
    return corpora


def study_texts(model: Any, corpora: Sequence["Corpus"], max_tokens: int) -> list["StudyText"]:
    """The first example of each corpus, then the second of each, and so on.

    Texts of a single token, which have no loss, are left out and said.
    """
    from cw_lens.corpora import corpus_prompts
    from cw_lens.studies.losses import StudyText

    texts = []
    for at in range(max(len(corpus.texts) for corpus in corpora)):
        for corpus in corpora:
            if at < len(corpus.texts):
                prompts = corpus_prompts(model, corpus.texts[at], max_tokens)
                texts.append(StudyText(corpus.name, corpus.rows[at], prompts))
    short = [text for text in texts if text.prompts.ids.shape[1] < 2]
    for text in short:
        console.print(f"left out {text.data}, row {text.example}: one token alone has no loss")
    return [text for text in texts if text not in short]


def study_facts(
    model: Any, texts: Sequence["StudyText"], configuration: dict[str, Any], corpora: Sequence[Any]
) -> dict[str, Any]:
    """What a manifest says of the run, with a certificate of each layer on the first text."""
    from cw_lens.identity import model_identity
    from cw_lens.runs import capture
    from cw_lens.studies.protection import protected_shares

    space = {name: configuration[name] for name in ("space", "allow_folded")}
    run = capture(model, texts[0].prompts, reduce=lambda layer: layer.index, **space)
    detectors = [name for name in configuration.get("protected", ()) if name != "none"]
    return {
        "configuration": configuration,
        "model": model_identity(model),
        "corpora": [{"name": c.name, "source": c.source, "rows": list(c.rows)} for c in corpora],
        "tokens": [[text.data, text.example, text.prompts.ids.shape[1]] for text in texts],
        "protected_share": {
            name: protected_shares(model, texts, name, **space) for name in detectors
        },
        "certificates": [asdict(certificate) for certificate in run.certificates],
    }


def kept(
    store: "UnitStore",
    run: Callable[[set[int]], Iterator[tuple[int, list[dict[str, Any]]]]],
    total: int,
    what: str,
) -> None:
    """Runs the batches that are missing, each kept as it ends, with the time that is left."""
    done = store.done()
    if done:
        console.print(f"{len(done)} of {total} batches were finished before and are kept")
    with progress_bar() as progress:
        task = progress.add_task(what, total=total, completed=len(done))
        try:
            for batch, units in run(done):
                store.add(batch, units)
                progress.advance(task)
        except KeyboardInterrupt:
            console.print(TAKE_UP)
            raise


def say_where(folder: Path, message: str | None) -> None:
    """Where the page is; and, last, how to get images of the figures, if there are none."""
    console.print(f"page: {(folder / 'report.html').resolve()}", soft_wrap=True)
    if message:
        console.print(message, soft_wrap=True, markup=False)
