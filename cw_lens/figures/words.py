"""What stands below a figure and beside its points."""

from collections.abc import Iterable

import pandas as pd

from cw_lens.figures.style import plain
from cw_lens.studies.comparisons import conditions
from cw_lens.studies.paper import curve_item


def caption(points: pd.DataFrame, confidence: float) -> str:
    """What a figure of curves shows, of how many texts, with what bars, and the paper's own."""
    first = points.to_dict("records")[0]
    where = conditions(first["data"], first["granularity"], first["protected"])
    clean = points["clean_perplexity"].dropna()
    parts = [
        f"Perplexity after the {first['remove']}-ranked pairs were removed; {where}; "
        f"{texts(points['n'])}, {_count(points['predicted'])} predicted tokens.",
        f"Bars: {100 * confidence:.3g} % bootstrap intervals of the change over texts.",
    ]
    if len(clean):
        parts.append(f"Dashed line: clean perplexity, {clean.median():.3g}.")
    seeds = points.loc[points["n_seeds"] > 1]
    if len(seeds):
        names = ", ".join(seeds["series"].unique())
        parts.append(f"Mean loss of {_count(seeds['n_seeds'])} seeds: {names}.")
    failed = sum(points["failed"].tolist())
    if failed:
        parts.append(f"{failed} units without a finite loss are left out.")
    return " ".join([*parts, _paper_figure(first)]).strip()


def area_caption(aopc: pd.DataFrame, confidence: float) -> str:
    """What a figure of areas shows, in which units, of how many texts."""
    first = aopc.to_dict("records")[0]
    where = conditions(first["data"], first["granularity"], first["protected"])
    return (
        f"Mean over {_count(aopc['fractions'])} fractions and {texts(aopc['n'])} of the change in "
        f"loss, nats per predicted token; {where}. "
        f"Bars: {100 * confidence:.3g} % bootstrap intervals over texts."
    )


def _paper_figure(row: dict) -> str:
    """Which figure of the paper shows the same, if one does."""
    item = curve_item(row)
    return (
        f"Compare figure {item.removeprefix('fig')} of the paper (arXiv 2606.07604)."
        if item
        else ""
    )


def point_text(row: dict) -> str:
    """All numbers of one point of a curve, as plotly's markup."""
    return "<br>".join(
        [
            f"<b>{plain(row['series'])}</b>, {row['fraction']:.4g} removed",
            f"perplexity {row['perplexity']:.4g}, clean {row['clean_perplexity']:.4g}",
            "change " + _with_interval(row, "delta_perplexity"),
            "change in loss " + _with_interval(row, "delta_nll") + " nats per token",
            f"KL {row['kl']:.3g} nats per token, top-1 kept {row['top1_agreement']:.1%}",
            f"{row['n']} texts, {row['failed']} failed units",
        ]
    )


def area_text(row: dict) -> str:
    """All numbers of one area, as plotly's markup."""
    return (
        f"<b>{plain(row['series'])}</b><br>AOPC {_with_interval(row, 'aopc')} nats per token<br>"
        f"mean change in perplexity {row['aopc_delta_perplexity']:.4g}<br>{row['n']} texts"
    )


def _with_interval(row: dict, name: str) -> str:
    text = f"{row[name]:.3g} [{row[f'{name}_low']:.3g}, {row[f'{name}_high']:.3g}]"
    return text.replace("-", "−")


def texts(counts: Iterable[int]) -> str:
    """How many texts there are: a number, or the range of several."""
    text = _count(counts)
    return f"{text} text{'s' * (text != '1')}"


def _count(counts: Iterable[int]) -> str:
    """A count, or the range of several."""
    low, high = min(map(int, counts)), max(map(int, counts))
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
