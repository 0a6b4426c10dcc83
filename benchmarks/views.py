"""How large the pages of `show_heads` are, and how soon Chromium has drawn them from disk.

    python benchmarks/views.py

Prints a table and exits with 1 if a bound that the project states is not met.
"""

import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import cw_lens
from cw_lens.browsers import find_browser
from cw_lens.prompts import prompts_from_ids

LARGE, USUAL = "32 heads x 512 tokens, one layer", "SmolLM2: 9 heads x 30 layers x 64 tokens"
TOKENS = {LARGE: 512, USUAL: 64}
MOST_MEGABYTES = {LARGE: 25.0, USUAL: 12.0}
MOST_SECONDS = {LARGE: 5.0, USUAL: 5.0}
SMALL_MAPS, LARGE_MAP = "#head-grid canvas", "#large .hm image"
MET, MISSED = "[green]met[/green]", "[red]missed[/red]"


def main() -> None:
    browser = find_browser()
    if browser is None:
        sys.exit("this benchmark needs chromium: run scripts/install-chromium.sh")
    model = cw_lens.load_model()
    written = model.tokenizer(Path(__file__).read_text() * 2)["input_ids"]
    text = [model.tokenizer.bos_token_id, *written][: max(TOKENS.values())]
    wide = wide_model(model.tokenizer)
    runs = {
        LARGE: cw_lens.capture(wide, prompts_from_ids(wide, [text[: TOKENS[LARGE]]]), layers=[1]),
        USUAL: cw_lens.capture(model, prompts_from_ids(model, [text[: TOKENS[USUAL]]])),
    }
    table = Table("page of show_heads", "MB", "made, s", "every small map, s", "drawn, s", "bound")
    met = True
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        program = playwright.chromium.launch(
            executable_path=browser, args=["--no-sandbox", "--disable-gpu"]
        )
        for name, run in runs.items():
            start = time.perf_counter()
            path = cw_lens.show_heads(run).save(Path(folder) / "page.html")
            made = time.perf_counter() - start
            megabytes = path.stat().st_size / 1e6
            page = program.new_page(viewport={"width": 1280, "height": 900})
            small, whole = seconds_to_draw(page, path)
            page.close()
            good = megabytes < MOST_MEGABYTES[name] and whole < MOST_SECONDS[name]
            met = met and good
            bound = f"{MOST_MEGABYTES[name]:.0f} MB, {MOST_SECONDS[name]:.0f} s"
            figures = [f"{value:.2f}" for value in (megabytes, made, small, whole)]
            table.add_row(name, *figures, f"{bound}: {MET if good else MISSED}")
        program.close()
    Console(width=140).print(table)
    sys.exit(0 if met else 1)


def wide_model(tokenizer: object) -> object:
    """A random model of 32 heads, which reads what the tokenizer writes."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    return cw_lens.wrap_model(LlamaForCausalLM(config).eval(), tokenizer)


def seconds_to_draw(page: Page, path: Path) -> tuple[float, float]:
    """From opening the page to all the small maps, and to the large one beside them."""
    start = time.perf_counter()
    page.goto(path.as_uri(), wait_until="commit")
    page.locator(SMALL_MAPS).last.wait_for(state="attached")
    small = time.perf_counter() - start
    page.locator(LARGE_MAP).first.wait_for(state="attached")
    return small, time.perf_counter() - start


if __name__ == "__main__":
    main()
