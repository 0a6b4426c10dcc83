"""`cw-lens paper`: the tables and figures of the paper, from a model and a corpus of one's own."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.table import Table

from cw_lens.cli.console import console
from cw_lens.cli.corpus_passes import ground_all, kept_pass, kept_rerun, opened_stores
from cw_lens.cli.corpus_texts import (
    configuration_of,
    kept,
    loaded_corpora,
    recipe,
    say_where,
    study_facts,
    study_texts,
)
from cw_lens.weights import EMBEDDED_MODEL

if TYPE_CHECKING:
    import pandas as pd


def paper(
    items: Annotated[tuple[str, ...], tyro.conf.Positional] = ("all",),
    /,
    *,
    model: str = EMBEDDED_MODEL,
    data: tuple[str, ...] = ("samples",),
    examples: int = 6,
    max_tokens: int = 96,
    field: str | None = None,
    sample_seed: int | None = None,
    fractions: tuple[float, ...] = (0.1, 0.5, 0.8),
    factors: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25, 0.0),
    layers: tuple[int, ...] = (),
    head: tuple[int, int] | None = None,
    points: int = 5_000_000,
    seeds: int = 3,
    batch_size: int = 8,
    space: Literal["residual", "attention"] = "residual",
    allow_folded: bool = False,
    out: Path = Path("runs/paper"),
    dtype: str = "float32",
    device: str = "cpu",
) -> None:
    """Reproduce tables and figures of the paper, and hold its claims against what is found here.

    Each number stands beside the one that the paper prints, with its interval and whether the
    claim holds here. Finished texts are kept: the same command takes up a run that was cut off.
    Writes paper.csv and the tables behind it (parquet and csv), figures/, report.html and
    manifest.json.

    Args:
        items: table1 to table5, fig3, fig4, fig5a, fig5b, fig6a, fig6b, fig6c, fig7 to fig12
            (amplification, appendix D.6), or all.
        model: smollm2-135m (embedded), a local model folder, a .gguf file, or a hub name.
        data: Corpora, as `cw-lens faithfulness` takes them; table3 needs two.
        examples: Texts of each corpus.
        max_tokens: Tokens at which each text is cut, the first (BOS) included.
        field: The field that holds the text, where it is not found by itself.
        sample_seed: Draw the texts at random with this seed, instead of taking the first.
        fractions: Of the curves: shares of the eligible (head, token) pairs that are removed.
        factors: Of the sweep: what the sink's value is multiplied by.
        layers: Where the sink is scaled; by default the layers whose mean attention to the first
            token is above 0.3.
        head: Layer and head to draw alone; by default one that shows the norm model, and one that
            shows the cone.
        points: Of each regression, at most.
        seeds: Of every random control; at least 3.
        batch_size: Conditions of one text that run at a time.
        space: Where a norm follows the output matrix: contributions behind it, or before it.
        allow_folded: Use a model whose value biases are folded into its output bias.
        out: The run folder.
        dtype: float32, float16, bfloat16 or float64.
        device: Where to run.
    """
    configuration = configuration_of("paper", locals())
    with console.status("importing torch and TransformerLens"):
        from cw_lens.folders import prepare_folder
        from cw_lens.models import load_model
        from cw_lens.paper_report import PaperRun, paper_tables
        from cw_lens.report import write_study
        from cw_lens.studies.curves import removal_curves
        from cw_lens.studies.faithfulness import UNIT_COLUMNS as REMOVAL_COLUMNS
        from cw_lens.studies.faithfulness import Study
        from cw_lens.studies.paper_items import (
            CONE,
            CURVES,
            ITEMS,
            SWEEP,
            curve_removals,
            named_items,
            require_rows,
            streamed_studies,
        )
        from cw_lens.studies.readings import READING_COLUMNS
        from cw_lens.studies.sinks import found_sink_layers, require_head
        from cw_lens.studies.sweep_results import sweep_curves
        from cw_lens.studies.sweeps import UNIT_COLUMNS, Sweep, sweep_conditions

    wanted = named_items(items)
    require_rows(items, data, factors)
    needed = {ITEMS[item] for item in wanted}
    conditions = sweep_conditions(factors, targets=("first",), surgery=(), seeds=seeds)
    removals, functions = curve_removals(wanted, fractions, seeds)
    prepare_folder(out, configuration, resumable=True)
    columns = {"readings": READING_COLUMNS, "reruns": READING_COLUMNS, "sweep": UNIT_COLUMNS}
    with opened_stores(out, configuration, columns | {"curves": REMOVAL_COLUMNS}) as stores:
        with console.status("reading the corpora"):
            corpora = loaded_corpora(data, examples, field, sample_seed)
        with console.status(f"loading {model}"):
            loaded = load_model(model, dtype=dtype, device=device)
        require_head(loaded, head)
        texts = study_texts(loaded, corpora, max_tokens)
        options: dict[str, Any] = {"space": space, "allow_folded": allow_folded}
        facts = study_facts(loaded, texts, configuration, corpora)
        ground_all(stores, corpora, facts)
        run = PaperRun(wanted, texts, Path(str(facts["model"]["name"])).name, head)
        if studies := streamed_studies(needed, loaded, texts, points):
            run.readings = kept_pass(stores["readings"], loaded, texts, studies, **options)
        if needed & {SWEEP, CONE}:
            sweep = Sweep(
                loaded,
                texts,
                layers or found_sink_layers(run.readings),
                conditions,
                batch_size=batch_size,
                **options,
            )
            if CONE in needed:
                run.reruns = kept_rerun(
                    stores["reruns"], loaded, texts, run.readings, sweep.layers, **options
                )
            if SWEEP in needed:
                kept(stores["sweep"], sweep.run, sweep.n_batches, "editing the sinks' values")
                run.sweep = sweep_curves(stores["sweep"].table())
        if CURVES in needed:
            study = Study(loaded, texts, removals, functions, batch_size=batch_size, **options)
            kept(stores["curves"], study.run, study.n_batches, "removing values")
            run.curves = removal_curves(stores["curves"].table())
        with console.status("fitting, drawing and bootstrapping"):
            chapter, message = write_study(out, paper_tables(run, points), facts, recipe())
    console.print(_table(chapter.sections[0].tables["paper"]))
    say_where(out, message)


def _table(found: "pd.DataFrame") -> Table:
    """Every number of the paper beside ours."""
    table = Table(title="The paper against here")
    for column in ("item", "data", "quantity"):
        table.add_column(column, ratio=4 if column == "quantity" else None)
    table.add_column("paper", justify="right", no_wrap=True)
    table.add_column("here [95 % interval]", justify="right", no_wrap=True)
    table.add_column("claim: does it hold?", ratio=2)
    for row in found.to_dict("records"):
        printed = "" if math.isnan(row["paper"]) else f"{row['paper']:.3f}"
        ends = "" if math.isnan(row["low"]) else f" [{row['low']:.3f}, {row['high']:.3f}]"
        names = row["item"], row["data"], row["quantity"]
        claim = f"{row['claim']}: {row['holds']}" if row["claim"] else ""
        table.add_row(*names, printed, f"{row['here']:.3f}{ends}", claim)
    return table
