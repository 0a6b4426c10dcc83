"""What reading a model costs, beside what one would run instead. Ratios, side by side, one process.

    python benchmarks/capture.py

Prints a table and exits with 1 if a bound that the project states is not met.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from side_by_side import median_ratio, seconds_of, side_by_side
from transformers import AutoModelForCausalLM

import cw_lens
from cw_lens.models import _embedded_folder
from cw_lens.prompts import Prompts, prompts_from_ids

TIME_TOKENS = 512
MEMORY_TOKENS = 1024
TIME_BOUND = 1.4
MEMORY_BOUND = 3.0
FACTORED_BOUND = 100.0


def main() -> None:
    model = cw_lens.load_model()
    hf_model = AutoModelForCausalLM.from_pretrained(_embedded_folder(), attn_implementation="sdpa")
    hf_model.eval()
    table = Table(title=f"SmolLM2-135M, float32, {torch.get_num_threads()} threads")
    for column in ("what", "figure", "bound"):
        table.add_column(column)
    kept = [timings(model, hf_model, table), memory(model, table), factored(table)]
    Console().print(table)
    sys.exit(0 if all(kept) else 1)


def timings(model, hf_model, table: Table) -> bool:
    """Token scores of the paper's four metrics against plain forward passes, in turn."""
    prompts = sample(model, TIME_TOKENS)
    seconds = side_by_side(
        {
            "scores": lambda: cw_lens.token_scores(model, prompts),
            "plain": lambda: plain(model, prompts),
            "no logits": lambda: plain(model, prompts, logits_to_keep=1),
            "sdpa": lambda: hf_model(prompts.ids, use_cache=False),
        }
    )
    ratio = median_ratio(seconds["scores"], seconds["plain"])
    name = f"token scores of 4 metrics, {TIME_TOKENS} tokens / "
    table.add_row(f"{name}TransformerLens forward", f"{ratio:.2f} x", f"<= {TIME_BOUND}")
    for other, label in (
        ("no logits", "TransformerLens forward, logits of one token"),
        ("sdpa", "Hugging Face SDPA forward"),
    ):
        table.add_row(name + label, f"{median_ratio(seconds['scores'], seconds[other]):.2f} x", "")
    return ratio <= TIME_BOUND


def memory(model, table: Table) -> bool:
    """Peak resident memory of the streamed run over a forward pass, in [head, query, key] tensors.

    Against the whole forward, whose peak is its logits, and against one that makes none.
    """
    prompts = sample(model, MEMORY_TOKENS)
    unit = model.cfg.n_heads * MEMORY_TOKENS**2 * 4
    runs = {
        "plain": lambda: plain(model, prompts),
        "no logits": lambda: plain(model, prompts, logits_to_keep=1),
        "scores": lambda: cw_lens.token_scores(model, prompts),
    }
    for run in runs.values():
        run()
    peaks = {name: statistics.median(peak(run) for _ in range(3)) for name, run in runs.items()}
    within = True
    for name, label in (("plain", "forward"), ("no logits", "forward, logits of one token")):
        over = (peaks["scores"] - peaks[name]) / unit
        within = within and over <= MEMORY_BOUND
        table.add_row(
            f"peak memory of token scores over TransformerLens {label}, {MEMORY_TOKENS} tokens",
            f"{over:+.2f} [head, query, key] tensors",
            f"<= {MEMORY_BOUND:g}",
        )
    return within


def factored(table: Table) -> bool:
    """Contributions in d_head against alpha v W_O materialised: 32 heads, d_model 4096, T = 128."""
    heads, d_head, length = 32, 128, 128
    generator = torch.Generator().manual_seed(0)
    layer = cw_lens.layer_attention(
        0,
        torch.rand(1, heads, length, length, generator=generator).tril(),
        torch.randn(1, heads, length, d_head, generator=generator),
        W_O=torch.randn(heads, d_head, heads * d_head, generator=generator),
        b_O=None,
        residual=torch.zeros(1, length, heads * d_head),
        ids=torch.zeros(1, length, dtype=torch.long),
        mask=torch.ones(1, length, dtype=torch.bool),
    )

    def materialised() -> torch.Tensor:
        edges = layer.pattern[..., None] * (layer.value @ layer.W_O)[:, :, None]
        inner = torch.einsum("bhqkm,bqm->bhqk", edges, layer.output)
        return inner / layer.output.pow(2).sum(-1)[:, None, :, None]

    fast = statistics.median(seconds_of(lambda: cw_lens.inter_head_contributions(layer), 7))
    start = time.perf_counter()
    literal = materialised()
    slow = time.perf_counter() - start
    torch.testing.assert_close(cw_lens.inter_head_contributions(layer), literal, rtol=0, atol=1e-5)
    ratio = slow / fast
    name = "materialised alpha v W_O / factored contributions, 32 heads, d_model 4096, T = 128"
    table.add_row(name, f"{ratio:.0f} x ({slow:.1f} s / {fast:.3f} s)", f">= {FACTORED_BOUND:g}")
    return ratio >= FACTORED_BOUND


def sample(model, length: int) -> Prompts:
    """Original text, long enough: this file itself, over and over."""
    ids = model.tokenizer(Path(__file__).read_text() * 8)["input_ids"]
    return prompts_from_ids(model, [[model.tokenizer.bos_token_id, *ids[: length - 1]]])


def plain(model, prompts: Prompts, **options: int) -> None:
    mask = prompts.mask.long()
    model(prompts.ids, return_type="logits", attention_mask=mask, use_cache=False, **options)


def peak(run: Callable[[], object]) -> int:
    """Highest resident memory in bytes while `run` runs (Linux)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    run()
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    with torch.no_grad():
        main()
