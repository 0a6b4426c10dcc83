"""`cw-lens validate`: token scores against the measured effect of each single value."""

from pathlib import Path
from typing import Annotated, Literal

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


def validate(
    model: Annotated[str, tyro.conf.Positional] = EMBEDDED_MODEL,
    /,
    *,
    data: tuple[str, ...] = ("samples",),
    examples: int = 1,
    max_tokens: int = 16,
    field: str | None = None,
    sample_seed: int | None = None,
    metrics: tuple[str, ...] = (
        "attention",
        "value_weighted",
        "value_weighted_output_normalized",
        "contribution",
        "stream_contribution",
        "gradient",
        "random",
    ),
    layers: tuple[int, ...] = (),
    batch_size: int = 32,
    space: Literal["residual", "attention"] = "residual",
    allow_folded: bool = False,
    out: Path = Path("runs/validate"),
    dtype: str = "float32",
    device: str = "cpu",
) -> None:
    """Mask each (layer, head, token) alone, and correlate the change in loss with each metric.

    One forward pass for each: layers * heads * tokens of them, so keep texts short. Finished ones
    are kept: the same command takes up a run that was cut off. Writes ablations, correlations
    (parquet and csv), report.html and manifest.json.

    Args:
        model: smollm2-135m (embedded), a local model folder, a .gguf file, or a hub name.
        data: Corpora, as `cw-lens faithfulness` takes them.
        examples: Texts of each corpus.
        max_tokens: Tokens at which each text is cut, the first (BOS) included.
        field: The field that holds the text, where it is not found by itself.
        sample_seed: Draw the texts at random with this seed, instead of taking the first.
        metrics: Whose token scores are correlated.
        layers: Layers whose values are masked; by default all that have attention.
        batch_size: Ablations that run at a time.
        space: Where a norm follows the output matrix: contributions behind it, or before it.
        allow_folded: Use a model whose value biases are folded into its output bias.
        out: The run folder.
        dtype: float32, float16, bfloat16 or float64.
        device: Where to run.
    """
    configuration = configuration_of("validate", locals())
    with console.status("importing torch and TransformerLens"):
        from cw_lens.folders import prepare_folder
        from cw_lens.models import load_model
        from cw_lens.report import write_study
        from cw_lens.scores import resolve_metrics
        from cw_lens.store import opened_store
        from cw_lens.studies.validation import (
            EFFECT_COLUMNS,
            Ablations,
            scored_ablations,
            validation_table,
        )

    functions = resolve_metrics(metrics)
    prepare_folder(out, configuration, resumable=True)
    with opened_store(out, configuration, EFFECT_COLUMNS) as store:
        with console.status("reading the corpora"):
            corpora = loaded_corpora(data, examples, field, sample_seed)
        with console.status(f"loading {model}"):
            loaded = load_model(model, dtype=dtype, device=device)
        texts = study_texts(loaded, corpora, max_tokens)
        ablations = Ablations(loaded, texts, layers=layers or None, batch_size=batch_size)
        facts = study_facts(loaded, texts, configuration, corpora)
        sources = [corpus.source for corpus in corpora]
        require_same_ground(store, sources, facts["model"]["weight_hash"])
        kept(store, ablations.run, ablations.n_batches, "masking values one by one")
        with console.status("correlating"):
            scored = scored_ablations(
                loaded,
                texts,
                store.table(),
                functions,
                layers=ablations.layers,
                space=space,
                allow_folded=allow_folded,
            )
            found = validation_table(scored, list(functions))
            tables = {"ablations": scored, "correlations": found}
            _, message = write_study(out, tables, facts, recipe())
    table = Table(title="Rank correlation with the measured change in loss, all values")
    for column in ("metric", "effect", "rho", "95 % interval", "within layers", "values"):
        table.add_column(column, justify="left" if column in ("metric", "effect") else "right")
    for row in found.loc[found["among"] == "all"].to_dict("records"):
        interval = f"[{row['low']:.3f}, {row['high']:.3f}]"
        numbers = f"{row['rho']:.3f}", interval, f"{row['within_layers']:.3f}", str(row["n"])
        table.add_row(row["metric"], row["effect"], *numbers)
    console.print(table)
    say_where(out, message)
