"""What one pass that feeds all streamed studies costs beside a plain one. Ratios, one process.

    python benchmarks/studies.py

Prints a table and exits with 1 if a bound that the project states is not met.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from side_by_side import median_ratio, side_by_side

import cw_lens
from cw_lens import backend
from cw_lens.prompts import prompts_from_ids
from cw_lens.runs import layer_indices
from cw_lens.studies.concentration import layer_concentration
from cw_lens.studies.edge_samples import layer_components, sampling_rates
from cw_lens.studies.losses import StudyText
from cw_lens.studies.readings import read_text
from cw_lens.studies.sinks import SINK_STUDIES

TOKENS, TEXTS, ROUNDS = 512, 32, 3
BOUND = 3.0


def main() -> None:
    model = cw_lens.load_model()
    written = Path(__file__).read_text() * 8
    ids = [model.tokenizer.bos_token_id, *model.tokenizer(written)["input_ids"][: TOKENS - 1]]
    text = StudyText("this file", 0, prompts_from_ids(model, [ids]))
    # as many points as `cw-lens paper` takes of a corpus of this size
    rates = sampling_rates(
        [TOKENS] * TEXTS, int(model.cfg.n_heads), len(layer_indices(model, None))
    )
    studies = {
        "components": partial(layer_components, **rates),
        "concentration": layer_concentration,
        **SINK_STUDIES,
    }
    runs: dict[str, Callable[[], object]] = {
        "TransformerLens forward": lambda: backend.forward(model, text.prompts),
        "all streamed studies": lambda: read_text(model, text, studies),
        "no study: the layers alone": lambda: read_text(model, text, {"none": lambda _: {}}),
    }
    for name, study in studies.items():
        runs[f"{name} alone"] = partial(read_text, model, text, {name: study})
    with torch.no_grad():
        seconds = side_by_side(runs, rounds=ROUNDS)
    plain = seconds["TransformerLens forward"]
    table = Table(title=f"One text of {TOKENS} tokens, {model.cfg.model_name}, median of {ROUNDS}")
    table.add_column("run")
    table.add_column("times the forward", justify="right")
    ratios = {name: median_ratio(taken, plain) for name, taken in seconds.items()}
    for name, ratio in ratios.items():
        table.add_row(name, f"{ratio:.2f}")
    Console().print(table)
    if not ratios["all streamed studies"] <= BOUND:
        print(f"the bound is {BOUND} times the forward", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
