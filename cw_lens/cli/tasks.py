"""`cw-lens tasks`: accuracy on benchmark tasks while what a metric calls unimportant is removed."""

from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table

from cw_lens.cli.console import console
from cw_lens.cli.corpus_texts import (
    configuration_of,
    kept,
    recipe,
    require_same_ground,
    say_where,
)
from cw_lens.errors import InputError
from cw_lens.weights import EMBEDDED_MODEL

RESULT_COLUMNS: dict[str, type] = {
    "task": str,
    "metric": str,
    "remove": str,
    "fraction": float,
    "seed": int,
    "example": int,
    "correct": float,
    "gold_loglikelihood": float,
}
_STEP = 1_000_000  # rows of a task, at most: batches are numbered by condition and first row


def tasks(
    model: Annotated[str, tyro.conf.Positional] = EMBEDDED_MODEL,
    /,
    *,
    names: tuple[Literal["mmlu", "winogrande", "boolq", "lambada"], ...] = (
        "mmlu",
        "winogrande",
        "boolq",
        "lambada",
    ),
    rows: tuple[str, ...] = (),
    examples: int = 200,
    sample_seed: int | None = 0,
    metrics: tuple[str, ...] = ("attention", "value_weighted", "contribution"),
    fractions: tuple[float, ...] = (0.3, 0.5, 0.7),
    remove: tuple[Literal["highest", "lowest"], ...] = ("lowest",),
    granularity: Literal["layer", "head", "global"] = "layer",
    ranking: Literal["online", "clean"] = "online",
    protected: str = "cosine",
    seeds: int = 3,
    batch_size: int = 8,
    space: Literal["residual", "attention"] = "residual",
    allow_folded: bool = False,
    out: Path = Path("runs/tasks"),
    dtype: str = "float32",
    device: str = "cpu",
) -> None:
    """Accuracy on MMLU, WinoGrande, BoolQ and LAMBADA, unmasked and under removal.

    Prompts and scoring are those of lm-evaluation-harness (extra `tasks`). Finished batches are
    kept: the same command takes up a run that was cut off. Writes results and accuracy (parquet
    and csv), report.html and manifest.json.

    Args:
        model: smollm2-135m (embedded), a local model folder, a .gguf file, or a hub name.
        names: The tasks.
        rows: Local rows instead of the hub's, as task=FILE.jsonl.
        examples: Questions of each task.
        sample_seed: Of the questions' random choice; none takes the first.
        metrics: What ranks the tokens; `random` is always added.
        fractions: Shares of the eligible (head, token) pairs that are removed.
        remove: lowest (sufficiency), highest or both.
        granularity: Rank pairs within each layer, each head, or over all layers (global).
        ranking: online, or clean, as gradient and global granularity always do.
        protected: The sink detector whose tokens are never removed, or none.
        seeds: Of the random control; at least 3.
        batch_size: Questions that run at a time.
        space: Where a norm follows the output matrix: contributions behind it, or before it.
        allow_folded: Use a model whose value biases are folded into its output bias.
        out: The run folder.
        dtype: float32, float16, bfloat16 or float64.
        device: Where to run.
    """
    configuration = configuration_of("tasks", locals())
    with console.status("importing torch, TransformerLens and lm-evaluation-harness"):
        from cw_lens.folders import prepare_folder
        from cw_lens.identity import model_identity
        from cw_lens.interventions import masked_values
        from cw_lens.models import load_model
        from cw_lens.removal import plan_of
        from cw_lens.report import write_study
        from cw_lens.scores import resolve_metrics
        from cw_lens.store import opened_store
        from cw_lens.studies.accuracy import accuracy_table, results_table
        from cw_lens.studies.conditions import removals_of
        from cw_lens.studies.tasks import task_results
        from cw_lens.tasks import load_task

    functions = resolve_metrics((*metrics, "random"))
    removals = removals_of(
        functions,
        fractions,
        remove=remove,
        granularity=(granularity,),
        ranking=ranking,
        protected=(protected,),
        seeds=seeds,
    )
    if not names:
        raise InputError("no task is named; give --names mmlu winogrande boolq lambada, or some.")
    local = dict(_named_file(given, names) for given in rows)
    prepare_folder(out, configuration, resumable=True)
    with opened_store(out, configuration, RESULT_COLUMNS) as store:
        with console.status("reading the tasks"):
            held = [
                load_task(name, local.get(name), examples, sample_seed=sample_seed)
                for name in dict.fromkeys(names)
            ]
        sources = [{"name": t.name, "source": t.source, "harness": t.harness} for t in held]
        with console.status(f"loading {model}"):
            loaded = load_model(model, dtype=dtype, device=device)
        identity = model_identity(loaded)
        require_same_ground(store, sources, identity["weight_hash"])
        conditions = [(task, removal) for removal in (None, *removals) for task in held]

        def run(_done: set[int]) -> Any:
            table = store.table()
            for number, (task, removal) in enumerate(conditions):
                keys = _keys(removal)

                def removing(prompts: Any, removal: Any = removal) -> Any:
                    if removal is None:
                        return nullcontext()
                    where = {"space": space, "allow_folded": allow_folded}
                    return masked_values(
                        loaded, plan_of(loaded, prompts, removal, functions, **where)
                    )

                done = _finished(table, task.name, keys)
                for results in task_results(
                    loaded, task, removing=removing, batch_size=batch_size, done=done
                ):
                    first = min(result.example for result in results)
                    units = results_table(task.name, results, **keys).to_dict("records")
                    yield number * _STEP + first, units

        batches = sum(-(-len(task.items) // batch_size) for task, _ in conditions)
        kept(store, run, batches, "answering questions")
        table = store.table()
        accuracy = accuracy_table(table)
        facts = {"configuration": configuration, "model": identity, "tasks": sources}
        tables = {"results": table, "accuracy": accuracy}
        chapter, message = write_study(out, tables, facts, recipe())
    console.print(_table(accuracy))
    for sentence in chapter.sentences:
        console.print(sentence, soft_wrap=True)
    say_where(out, message)


def _keys(removal: Any) -> dict[str, Any]:
    if removal is None:
        return {"metric": "none", "remove": "none", "fraction": 0.0, "seed": 0}
    return {name: getattr(removal, name) for name in ("metric", "remove", "fraction", "seed")}


def _finished(results: Any, task: str, keys: dict[str, Any]) -> set[int]:
    """The questions of a task that are answered under these conditions."""
    for name, value in {"task": task, **keys}.items():
        results = results[results[name] == value]
    return set(results["example"])


def _named_file(given: str, names: Collection[str]) -> tuple[str, str]:
    name, equals, file = given.partition("=")
    if not equals or not file:
        raise InputError(f"--rows {given!r} is not task=FILE, such as boolq=rows/boolq.jsonl.")
    if name not in names:
        raise InputError(
            f"--rows {given!r} is of a task that is not run; those run are {', '.join(names)}."
        )
    return name, file


def _table(accuracy: Any) -> Table:
    table = Table(title="Accuracy [95 % interval], and its difference to the unmasked run")
    for column in ("task", "metric", "remove", "fraction"):
        table.add_column(column)
    for column in ("accuracy", "difference", "questions"):
        table.add_column(column, justify="right")
    for row in accuracy.to_dict("records"):
        table.add_row(
            *(str(row[name]) for name in ("task", "metric", "remove", "fraction")),
            f"{row['accuracy']:.3f} [{row['accuracy_low']:.3f}, {row['accuracy_high']:.3f}]",
            f"{row['difference']:+.3f} [{row['difference_low']:+.3f}, "
            f"{row['difference_high']:+.3f}]",
            str(row["n"]),
        )
    return table
