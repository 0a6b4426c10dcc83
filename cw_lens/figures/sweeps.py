"""What is lost as the sink's value is scaled or cut, as figures (paper, figure 6c)."""

import pandas as pd
import plotly.graph_objects as go

from cw_lens.figures.panels import interval_lines, interval_rows, with_caption
from cw_lens.figures.words import texts
from cw_lens.studies.sweep_results import SweepCurves

SCALED = {
    ("scale", "first"): "first token",
    ("scale", "control"): "control token",
    ("random", "first"): "random vector, as long",
    ("scale", "sinks"): "all sinks",
}
"""The series of a sweep by edit and target, in the order of their colours."""
CUT = {
    "keep_parallel": "along μ alone",
    "keep_orthogonal": "orthogonal to μ alone",
    "flip_parallel": "along μ reversed",
    "mean": "mean of the others",
    "scale": "removed",
}
"""The kinds of surgery, and the removal."""


def sweep_figure(
    curves: SweepCurves, data: str, model: str, *, recipe: str | None = None
) -> go.Figure:
    """Figure 6c: change in loss against the factor of the value, beside the controls.

    Args:
        curves: of `sweep_curves`.
        data: the corpus.
        model: its name.
        recipe: the command that makes the figure again.
    """
    points = curves.points.loc[curves.points["data"] == data]
    names = [SCALED.get(key) for key in zip(points["edit"], points["target"], strict=True)]
    series = pd.Categorical(names, categories=list(SCALED.values()), ordered=True)
    rows = points.assign(series=series).dropna(subset=["series"])
    rows = rows.assign(low=rows["delta_nll_low"], high=rows["delta_nll_high"])
    where = _where(rows, data, model)
    figure = interval_lines(
        rows.sort_values(["series", "factor"]),
        x="factor",
        series="series",
        value="delta_nll",
        title="Scaling the sink's value",
        subtitle=where,
        x_title="γ, what the value is multiplied by",
        y_title="change in loss, nats per token",
        level=0.0,
    )
    figure.update_xaxes(autorange="reversed")
    # where the first token is the only sink, the two curves are one: both markers stay in sight
    over = {"symbol": "triangle-up-open", "size": 11}
    figure.update_traces(marker=over, selector={"name": SCALED["scale", "sinks"]})
    return with_caption(
        figure,
        f"Mean change in loss over texts; {where}; clean perplexity "
        f"{rows['clean_perplexity'].iloc[0]:.3g}. Bars: {100 * curves.confidence:.3g} % bootstrap "
        "intervals over texts. Compare figure 6c of the paper (arXiv 2606.07604).",
        recipe,
    )


def surgery_figure(
    curves: SweepCurves, data: str, model: str, *, recipe: str | None = None
) -> go.Figure | None:
    """Change in loss when the sink's value is cut to a part of itself; None if nothing was cut.

    Args: as `sweep_figure`.
    """
    points = curves.points.loc[curves.points["data"] == data]
    kept = points["edit"].isin([*CUT]) & points["target"].isin(["first", "sinks"])
    whole = (points["edit"] == "scale") == (points["factor"] == 0)
    rows = points.loc[kept & whole]
    if not (rows["edit"] != "scale").any():
        return None
    rows = rows.assign(
        kind=rows["edit"].map(CUT),
        series=rows["target"].map({"first": "first token", "sinks": "all sinks"}),
        low=rows["delta_nll_low"],
        high=rows["delta_nll_high"],
    )
    where = _where(rows, data, model)
    figure = interval_rows(
        rows,
        row="kind",
        series="series",
        value="delta_nll",
        title="The sink's value, cut to a part of itself",
        subtitle=where,
        x_title="change in loss, nats per token",
        level=0.0,
    )
    return with_caption(
        figure,
        f"Mean change in loss over texts; μ is the mean direction of the non-sink values; {where}. "
        f"Bars: {100 * curves.confidence:.3g} % bootstrap intervals over texts. Not in the paper.",
        recipe,
    )


def _where(rows: pd.DataFrame, data: str, model: str) -> str:
    layers = rows["layers"].iloc[0].replace(",", ", ")
    return f"{model}, {data}, layers {layers}, {texts(rows['n'])}"
