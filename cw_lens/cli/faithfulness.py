"""`cw-lens faithfulness`: what a model loses with the tokens that a metric names."""

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table

from cw_lens.cli.console import console
from cw_lens.cli.corpus_texts import (
    configuration_of,
    kept,
    loaded_corpora,
    recipe,
    require_same_ground,
    say_where,
    study_facts,
    study_texts,
)
from cw_lens.weights import EMBEDDED_MODEL

DEFAULT_METRICS = (
    "attention",
    "value_weighted",
    "value_weighted_output_normalized",
    "contribution",
    "stream_contribution",
)


def faithfulness(
    model: Annotated[str, tyro.conf.Positional] = EMBEDDED_MODEL,
    /,
    *,
    data: tuple[str, ...] = ("samples",),
    examples: int = 32,
    max_tokens: int = 512,
    field: str | None = None,
    sample_seed: int | None = None,
    metrics: tuple[str, ...] = DEFAULT_METRICS,
    fractions: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9),
    remove: tuple[Literal["highest", "lowest"], ...] = ("highest", "lowest"),
    granularity: tuple[Literal["layer", "head", "global"], ...] = ("layer",),
    ranking: Literal["online", "clean"] = "online",
    protected: tuple[str, ...] = ("cosine",),
    seeds: int = 3,
    batch_size: int = 8,
    space: Literal["residual", "attention"] = "residual",
    allow_folded: bool = False,
    out: Path = Path("runs/faithfulness"),
    dtype: str = "float32",
    device: str = "cpu",
) -> None:
    """Remove the tokens that each metric names, and measure what the model loses.

    Removing the highest (comprehensiveness) should hurt most, the lowest (sufficiency) least. A
    random control and a run that removes nothing are always made. Finished units are kept: the
    same command takes up a run that was cut off. Writes units.parquet, curves, aopc and
    comparisons (parquet and csv), figures/, report.html and manifest.json.

    Args:
        model: smollm2-135m (embedded), a local model folder, a .gguf file, or a hub name.
        data: samples (shipped), gsm8k, fineweb-edu, wikitext, a jsonl, parquet, csv or text file,
            or a data set on the hub as name, name:subset or name:subset:split. One or several.
        examples: Texts of each corpus.
        max_tokens: Tokens at which each text is cut, the first (BOS) included.
        field: The field that holds the text, where it is not found by itself.
        sample_seed: Draw the texts at random with this seed, instead of taking the first.
        metrics: What ranks the tokens; `random` is always added.
        fractions: Shares of the eligible (head, token) pairs that are removed.
        remove: highest, lowest or both.
        granularity: Rank pairs within each layer, each head, or over all layers (global).
        ranking: online, from the very pass that is masked; or clean, from a pass before it, as
            gradient and global granularity always do.
        protected: The sink detector whose tokens are never removed, or none. One or several.
        seeds: Of the random control; at least 3.
        batch_size: Conditions of one text that run at a time.
        space: Where a norm follows the output matrix (Gemma, OLMo 2): rank by contributions behind
            it, where they act, or before it.
        allow_folded: Use a model whose value biases are folded into its output bias.
        out: The run folder.
        dtype: float32, float16, bfloat16 or float64.
        device: Where to run.
    """
    configuration = configuration_of("faithfulness", locals())
    with console.status("importing torch and TransformerLens"):
        from cw_lens.folders import prepare_folder
        from cw_lens.models import load_model
        from cw_lens.report import write_study
        from cw_lens.scores import resolve_metrics
        from cw_lens.store import opened_store
        from cw_lens.studies.conditions import removals_of
        from cw_lens.studies.curves import removal_curves
        from cw_lens.studies.faithfulness import UNIT_COLUMNS, Study
        from cw_lens.study_report import faithfulness_tables

    functions = resolve_metrics(metrics)
    removals = removals_of(
        functions,
        fractions,
        remove=remove,
        granularity=granularity,
        ranking=ranking,
        protected=protected,
        seeds=seeds,
    )
    prepare_folder(out, configuration, resumable=True)
    with opened_store(out, configuration, UNIT_COLUMNS) as store:
        with console.status("reading the corpora"):
            corpora = loaded_corpora(data, examples, field, sample_seed)
        with console.status(f"loading {model}"):
            loaded = load_model(model, dtype=dtype, device=device)
        texts = study_texts(loaded, corpora, max_tokens)
        study = Study(
            loaded,
            texts,
            removals,
            functions,
            batch_size=batch_size,
            space=space,
            allow_folded=allow_folded,
        )
        facts = study_facts(loaded, texts, configuration, corpora)
        sources = [corpus.source for corpus in corpora]
        require_same_ground(store, sources, facts["model"]["weight_hash"])
        kept(store, study.run, study.n_batches, "removing values")
        units = store.table()
        with console.status("drawing curves and intervals"):
            curves = removal_curves(units)
            tables = faithfulness_tables(units, curves)
            chapter, message = write_study(out, tables, facts, recipe())
    console.print(_table(curves.aopc))
    for sentence in chapter.sentences:
        console.print(sentence, soft_wrap=True, markup=False)
    say_where(out, message)


def _table(aopc: Any) -> Table:
    """Each metric's area over its curve, in nats a token."""
    table = Table(title="Loss added, mean over fractions, nats a token [95 % interval]")
    for column in ("data", "granularity", "sinks", "remove", "metric"):
        table.add_column(column)
    table.add_column("AOPC", justify="right")
    for row in aopc.to_dict("records"):
        table.add_row(
            *(str(row[name]) for name in ("data", "granularity", "protected", "remove", "series")),
            f"{row['aopc']:.3f} [{row['aopc_low']:.3f}, {row['aopc_high']:.3f}]",
        )
    return table
