"""What a masked forward pass costs beside a plain one. Ratios, side by side, one process.

    python benchmarks/faithfulness.py

Prints a table and exits with 1 if a bound that the project states is not met.
"""

import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from side_by_side import median_ratio, side_by_side

import cw_lens
from cw_lens import backend
from cw_lens.metrics import METRICS
from cw_lens.prompts import prompts_from_ids, repeated
from cw_lens.removal import Removal, clean_masks, clean_ranking, online_plan
from cw_lens.runs import layer_indices

TOKENS, CONDITIONS, ROUNDS = 256, 8, 5
BOUND = 1.6


def main() -> None:
    model = cw_lens.load_model()
    text = Path(__file__).read_text() * 8
    ids = [model.tokenizer.bos_token_id, *model.tokenizer(text)["input_ids"][: TOKENS - 1]]
    alone = prompts_from_ids(model, [ids])
    batch, layers = repeated(alone, CONDITIONS), layer_indices(model, None)

    def removals(metric: str, ranking: str) -> list[Removal]:
        fractions = [(at + 1) / 10 for at in range(CONDITIONS // 2)]
        return [
            Removal(metric, remove, fraction, ranking=ranking)
            for remove in ("highest", "lowest")
            for fraction in fractions
        ]

    def online(metric: str) -> None:
        plan = online_plan(batch, removals(metric, "online"), METRICS, layers)
        with cw_lens.masked_values(model, plan):
            backend.forward(model, batch)

    ranking = clean_ranking(model, alone, removals("contribution", "clean"), METRICS, layers=layers)

    def clean() -> None:
        masks = clean_masks(ranking, removals("contribution", "clean"))
        with cw_lens.masked_values(model, masks):
            backend.forward(model, batch)

    def one_by_one() -> None:
        for removal in removals("contribution", "online"):
            plan = online_plan(alone, [removal], METRICS, layers)
            with cw_lens.masked_values(model, plan):
                backend.forward(model, alone)

    seconds = side_by_side(
        {
            "plain": lambda: backend.forward(model, batch),
            "contribution": lambda: online("contribution"),
            "attention": lambda: online("attention"),
            "clean": clean,
            "one by one": one_by_one,
        },
        ROUNDS,
    )
    table = Table(
        title=f"SmolLM2-135M, float32, {TOKENS} tokens, {CONDITIONS} conditions, "
        f"{torch.get_num_threads()} threads"
    )
    for column in ("what", "figure", "bound"):
        table.add_column(column)
    ratio = median_ratio(seconds["contribution"], seconds["plain"])
    rows = {
        "online contribution ranking / TransformerLens forward": ratio,
        "online attention ranking / the same": median_ratio(seconds["attention"], seconds["plain"]),
        "masks of a clean ranking / the same": median_ratio(seconds["clean"], seconds["plain"]),
        "conditions one by one / in a batch": median_ratio(
            seconds["one by one"], seconds["contribution"]
        ),
    }
    for at, (what, figure) in enumerate(rows.items()):
        table.add_row(what, f"{figure:.2f} x", f"<= {BOUND}" if at == 0 else "")
    Console().print(table)
    sys.exit(0 if ratio <= BOUND else 1)


if __name__ == "__main__":
    with torch.no_grad():
        main()
