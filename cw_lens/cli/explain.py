"""`cw-lens explain`: one text, and what each of its tokens gives."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.table import Table

from cw_lens.cli.console import console, progress_bar
from cw_lens.errors import InputError
from cw_lens.weights import EMBEDDED_MODEL

if TYPE_CHECKING:
    from cw_lens.studies.explain import Explanation

MAX_ROWS = 12


def explain(
    model: Annotated[str, tyro.conf.Positional] = EMBEDDED_MODEL,
    /,
    *,
    text: str | None = None,
    file: Path | None = None,
    layers: tuple[int, ...] = (),
    metrics: tuple[str, ...] = (),
    space: Literal["residual", "attention"] = "residual",
    allow_folded: bool = False,
    out: Path = Path("runs/explain"),
    truncate: bool = False,
    size_budget: float = 25.0,
    dtype: str = "float32",
    device: str = "cpu",
) -> None:
    """Show what each token of a text gives, beside the attention it gets.

    Writes a run folder: report.html, token_scores.parquet, heads.parquet, manifest.json.

    Args:
        model: smollm2-135m (embedded), a local model folder, a .gguf file, or a hub name.
        text: The text.
        file: A file that holds the text, in UTF-8.
        layers: Layers whose heads are shown whole; by default the three where attention misleads
            most. Negative numbers count from the end.
        metrics: Metrics to score tokens by beside the usual ones.
        space: Where a norm follows the output matrix (Gemma, OLMo 2): measure contributions behind
            it, where they act, or before it.
        allow_folded: Read a model whose value biases are folded into its output bias.
        out: The run folder.
        truncate: Cut a text that is longer than the model's context.
        size_budget: Largest size of the page in MB; what does not fit is left out and named.
        dtype: float32, float16, bfloat16 or float64.
        device: Where to run.
    """
    content = _content(text, file)
    configuration: dict[str, Any] = {
        "command": "explain",
        "model": model,
        "text": content,
        "layers": list(layers),
        "metrics": list(metrics),
        "space": space,
        "allow_folded": allow_folded,
        "truncate": truncate,
        "size_budget": size_budget,
        "dtype": dtype,
        "device": device,
    }
    with console.status("importing torch and TransformerLens"):
        from cw_lens import explain_report, views
        from cw_lens.folders import prepare_folder
        from cw_lens.models import load_model
        from cw_lens.prompts import tokenize
        from cw_lens.runs import layer_indices
        from cw_lens.scores import resolve_metrics
        from cw_lens.studies.explain import explain as run_explain

    resolve_metrics(metrics or ("attention",))
    prepare_folder(out, configuration)
    with console.status(f"loading {model}"):
        loaded = load_model(model, dtype=dtype, device=device)
    if layers:
        layer_indices(loaded, layers)
    prompts = tokenize(loaded, content, truncate=truncate)
    with progress_bar() as progress:
        task = progress.add_task("reading layers", total=len(layer_indices(loaded, None)))
        explanation = run_explain(
            loaded,
            prompts,
            layers=layers or None,
            metrics=metrics,
            space=space,
            allow_folded=allow_folded,
            progress=lambda done: progress.update(task, completed=done),
        )
    console.print(f"drawing the page, at most {size_budget:g} MB")
    command = shlex.join(["cw-lens", *sys.argv[1:]])
    page = views.explain_page(explanation, size_budget=size_budget * 1e6, recipe=command)
    console.print(f"estimated {page.estimated_bytes / 1e6:.1f} MB")
    for omission in page.omissions:
        console.print(f"left out of the page: {omission}")
    explain_report.write_explanation(out, explanation, page, configuration, command)
    worst = explain_report.worst_certificate(explanation.certificates)
    console.print(_first_token_table(explanation))
    console.print(
        f"certificate: sum of alpha v W_O equals every layer's output within "
        f"{worst.error:.1e} (tolerance {worst.tolerance:.0e})"
    )
    console.print(f"page: {(out / 'report.html').resolve()}", soft_wrap=True)


def _content(text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        raise InputError("give the text with --text, or a file that holds it with --file.")
    if file is None:
        return text or ""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}. Check the path.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text ({error.reason}). Convert it first.") from error


def _first_token_table(explanation: "Explanation") -> Table:
    """First token: its attention against what it gives, by layer."""
    heads = explanation.heads
    table = Table(title=f"First token {explanation.prompts.tokens[0][0]!r}, mean over queries")
    for column in ("layer", "attention", "value-weighted", "contribution"):
        table.add_column(column, justify="right")
    columns = (
        heads.first_attention.mean(dim=1).tolist(),
        heads.first_value_weighted.sum(dim=1).tolist(),
        heads.first_contribution.sum(dim=1).tolist(),
    )
    step = -(-len(heads.layers) // MAX_ROWS)
    for row in range(0, len(heads.layers), step):
        table.add_row(str(heads.layers[row]), *(f"{column[row]:.3f}" for column in columns))
    table.add_row("mean", *(f"{sum(column) / len(column):.3f}" for column in columns))
    return table
