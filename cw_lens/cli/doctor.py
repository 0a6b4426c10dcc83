"""`cw-lens doctor`: what works on a model."""

from typing import Annotated

import tyro
from rich.table import Table
from rich.text import Text

from cw_lens.cli.console import console
from cw_lens.errors import CWLensError
from cw_lens.weights import EMBEDDED_MODEL


class ModelRefusedError(CWLensError):
    """Doctor found that the toolkit cannot work on the model."""


def doctor(
    model: Annotated[str, tyro.conf.Positional] = EMBEDDED_MODEL,
    /,
    *,
    allow_folded: bool = False,
    dtype: str = "float32",
    device: str = "cpu",
) -> None:
    """Try what works on a model: reading, writing, padding; exit code 1 if something needed fails.

    Args:
        model: smollm2-135m (embedded), a local model folder, a .gguf file, or a hub name.
        allow_folded: Allow value biases that are folded into the output bias.
        dtype: float32, float16, bfloat16 or float64.
        device: Where to run.
    """
    with console.status("importing torch and TransformerLens"):
        from cw_lens.checks import REFUSE
        from cw_lens.checks import doctor as diagnose
        from cw_lens.models import load_model

    with console.status(f"loading {model}"):
        loaded = load_model(model, dtype=dtype, device=device)
    with console.status("trying what works"):
        diagnosis = diagnose(loaded, allow_folded=allow_folded)
    table = Table(title=Text(f"What works on {model}"))
    for column in ("feature", "", "what was seen", "remedy"):
        table.add_column(column, overflow="fold")
    styles = {"pass": "green", "note": "yellow", "refuse": "red"}
    for finding in diagnosis.findings:
        style = styles[finding.status]
        row = (finding.feature, finding.status, finding.what, finding.remedy)
        table.add_row(*(Text(cell, style=style if cell is row[1] else "") for cell in row))
    console.print(table)
    if not diagnosis.ok:
        refused = [f.feature for f in diagnosis.findings if f.needed and f.status == REFUSE]
        raise ModelRefusedError(
            f"{model} is refused: {', '.join(refused)}. The table says why and what to do."
        )
