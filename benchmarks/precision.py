"""Writes docs/precision.md: what low precision costs, on the default model, layer by layer.

python benchmarks/precision.py
"""

from importlib.metadata import version
from pathlib import Path

import torch

import cw_lens
from cw_lens.certificates import TOLERANCE

PAGE = Path(__file__).parents[1] / "docs" / "precision.md"
TEXT = (
    "Question: A farmer has 17 sheep and buys 5 more every week. How many sheep does she have "
    "after 8 weeks?\nAnswer: She buys 5 * 8 = 40 sheep, so she has 17 + 40 = 57 sheep. #### 57"
)


def measured(dtype: str) -> dict[str, float | torch.Tensor]:
    model = cw_lens.load_model(dtype=dtype)
    prompts = cw_lens.tokenize(model, TEXT)

    def reduce(layer: cw_lens.LayerAttention) -> tuple[float, float, torch.Tensor]:
        shares = cw_lens.inter_head_contributions(layer)
        rows = (layer.pattern.sum(dim=-1) - 1).abs().max().item()
        return rows, (shares.sum(dim=(1, 3)) - 1).abs().max().item(), shares

    run = cw_lens.capture(model, prompts, reduce=reduce)
    return {
        "value": max(c.value_error for c in run.certificates),
        "output": max(c.output_error or 0.0 for c in run.certificates),
        "rows": max(rows for rows, _, _ in run.layers),
        "sums": max(sums for _, sums, _ in run.layers),
        "shares": torch.stack([shares for _, _, shares in run.layers]),
        "tokens": prompts.ids.shape[1],
    }


def main() -> None:
    results = {name: measured(name) for name in ("float32", "bfloat16", "float16")}
    exact = results["float32"]["shares"]
    lines = []
    for name, found in results.items():
        miss = (found["shares"] - exact).abs()
        ranks = torch.corrcoef(
            torch.stack([x.sum(dim=3).flatten() for x in (found["shares"], exact)])
        )[0, 1]
        lines.append(
            f"| {name} | {TOLERANCE[getattr(torch, name)]:.0e} | {found['value']:.1e} | "
            f"{found['output']:.1e} | {found['rows']:.1e} | {found['sums']:.1e} | "
            f"{miss.max():.1e} | {miss.mean():.1e} | {ranks:.6f} |"
        )
    PAGE.write_text(
        f"""# Precision

Models compute in their own dtype; cw_lens raises what it reads to float32 (float64 for a float64
model), rebuilds every output from its parts and takes shares of that: they sum to 1 in any dtype.
What differs between dtypes is what the model computed. The certificate of each layer says how far
the parts are from what the model's own dtype made of them, and refuses beyond the tolerance.

SmolLM2-135M on the CPU, {exact.shape[0]} layers, one text of {results["float32"]["tokens"]} tokens
(torch {version("torch")}, transformer-lens {version("transformer-lens")}), written by
`python benchmarks/precision.py`; each figure is the worst over layers, heads, queries and keys:

| dtype | tolerance | Σ α v = z | z W_O + b_O = output | Σ α = 1 | shares sum to 1 | share against \
float32's, worst | mean | correlation of heads' shares with float32's |
|---|---|---|---|---|---|---|---|---|
"""
        + "\n".join(lines)
        + """

float64 has the tolerance 1e-06: the norms of Hugging Face's models compute in float32 whatever the
model's dtype, and so does a norm behind the output matrix.

A share is relative to its own layer's output. Where low precision moves the residual stream, it
moves what later layers compute; that is the model's difference, not an error of the share.
"""
    )


if __name__ == "__main__":
    main()
