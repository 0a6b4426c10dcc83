"""`cw-lens sinks`: where a model's sinks are, what they look like, and what they do."""

from pathlib import Path
from typing import Annotated, Literal

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


def sinks(
    model: Annotated[str, tyro.conf.Positional] = EMBEDDED_MODEL,
    /,
    *,
    data: tuple[str, ...] = ("samples",),
    examples: int = 8,
    max_tokens: int = 256,
    field: str | None = None,
    sample_seed: int | None = None,
    factors: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25, 0.0),
    targets: tuple[Literal["first", "sinks"], ...] = ("first", "sinks"),
    surgery: bool = True,
    layers: tuple[int, ...] = (),
    head: tuple[int, int] | None = None,
    seeds: int = 3,
    batch_size: int = 8,
    space: Literal["residual", "attention"] = "residual",
    allow_folded: bool = False,
    out: Path = Path("runs/sinks"),
    dtype: str = "float32",
    device: str = "cpu",
) -> None:
    """Find the attention sinks, measure their geometry, and scale, replace and cut their values.

    Alignment by depth, the norm model, the semantic cone, the γ sweep with its controls, and
    surgery that keeps one part of the sink's value. Finished texts are kept: the same command
    takes up a run that was cut off. Writes tables (parquet and csv), figures/, report.html and
    manifest.json.

    Args:
        model: smollm2-135m (embedded), a local model folder, a .gguf file, or a hub name.
        data: Corpora, as `cw-lens faithfulness` takes them.
        examples: Texts of each corpus.
        max_tokens: Tokens at which each text is cut, the first (BOS) included.
        field: The field that holds the text, where it is not found by itself.
        sample_seed: Draw the texts at random with this seed, instead of taking the first.
        factors: γ, what the values are multiplied by.
        targets: Scale the first token, all that the cosine detector marks (sinks), or both.
        surgery: Also keep only the part of the value along the others' mean, only the orthogonal
            part, reverse it, or put the mean in its place.
        layers: Where values are scaled; by default the layers whose mean attention to the first
            token is above 0.3.
        head: Layer and head to draw alone; by default one that shows the norm model, and one that
            shows the cone.
        seeds: Of the control token and the random vector; at least 3.
        batch_size: Conditions of one text that run at a time.
        space: Where a norm follows the output matrix: contributions behind it, or before it.
        allow_folded: Use a model whose value biases are folded into its output bias.
        out: The run folder.
        dtype: float32, float16, bfloat16 or float64.
        device: Where to run.
    """
    configuration = configuration_of("sinks", locals())
    with console.status("importing torch and TransformerLens"):
        from cw_lens.folders import prepare_folder
        from cw_lens.models import load_model
        from cw_lens.report import write_study
        from cw_lens.sink_report import sink_tables
        from cw_lens.studies.readings import READING_COLUMNS
        from cw_lens.studies.sinks import (
            SINK_STUDIES,
            found_sink_layers,
            require_head,
            sink_profiles,
        )
        from cw_lens.studies.sweep_results import sweep_curves
        from cw_lens.studies.sweeps import UNIT_COLUMNS, Sweep, sweep_conditions
        from cw_lens.value_edits import SURGERY

    cuts = SURGERY if surgery else ()
    conditions = sweep_conditions(factors, targets=targets, surgery=cuts, seeds=seeds)
    prepare_folder(out, configuration, resumable=True)
    columns = {"readings": READING_COLUMNS, "reruns": READING_COLUMNS, "sweep": UNIT_COLUMNS}
    with opened_stores(out, configuration, columns) as stores:
        with console.status("reading the corpora"):
            corpora = loaded_corpora(data, examples, field, sample_seed)
        with console.status(f"loading {model}"):
            loaded = load_model(model, dtype=dtype, device=device)
        require_head(loaded, head)
        texts = study_texts(loaded, corpora, max_tokens)
        options = {"space": space, "allow_folded": allow_folded}
        facts = study_facts(loaded, texts, configuration, corpora)
        ground_all(stores, corpora, facts)
        readings = kept_pass(stores["readings"], loaded, texts, SINK_STUDIES, **options)
        where = layers or found_sink_layers(readings)
        sweep = Sweep(loaded, texts, where, conditions, batch_size=batch_size, **options)
        reruns = kept_rerun(stores["reruns"], loaded, texts, readings, sweep.layers, **options)
        kept(stores["sweep"], sweep.run, sweep.n_batches, "editing the sinks' values")
        units = stores["sweep"].table()
        with console.status("fitting, drawing and bootstrapping"):
            profiles = sink_profiles(readings, reruns, texts)
            curves = sweep_curves(units)
            tables = sink_tables(profiles, units, curves, head=head)
            facts |= {"sink_layers": list(sweep.layers)}
            _, message = write_study(out, tables, facts, recipe())
    table = Table(title="Change in loss as the sinks' values are edited, nats a token [95 %]")
    for column in ("data", "edit", "target"):
        table.add_column(column)
    for column in ("γ", "change", "perplexity", "texts"):
        table.add_column(column, justify="right")
    for row in curves.points.to_dict("records"):
        interval = f"[{row['delta_nll_low']:.3f}, {row['delta_nll_high']:.3f}]"
        numbers = f"{row['delta_nll']:.3f} {interval}", f"{row['perplexity']:.4g}", f"{row['n']}"
        table.add_row(row["data"], row["edit"], row["target"], f"{row['factor']:g}", *numbers)
    console.print(table)
    if len(curves.failed):
        reasons = ", ".join(curves.failed["failed"].drop_duplicates())
        console.print(f"{len(curves.failed)} edits have no loss and count nowhere: {reasons}")
    say_where(out, message)
