"""What single values do to the loss, and removal to accuracy, as figures."""

import pandas as pd
import plotly.graph_objects as go

from cw_lens.figures.panels import interval_lines, interval_rows, with_caption

AMONG = {"all": "all values", "without sinks": "those that are no sinks"}


def correlation_figure(
    correlations: pd.DataFrame, where: str, *, recipe: str | None = None
) -> go.Figure:
    """Each metric's rank correlation with the size of the measured effect, the best on top.

    Args:
        correlations: of `validation_table`.
        where: model and corpus, as plain text.
        recipe: the command that makes the figure again.
    """
    rows = correlations.loc[correlations["effect"] == "size"].drop(columns="n")
    best = rows.loc[rows["among"] == "all"].sort_values("rho", ascending=False)
    rows = rows.assign(
        series=rows["among"].map(AMONG),
        row=pd.Categorical(rows["metric"], categories=best["metric"].tolist(), ordered=True),
    ).sort_values(["row", "among"])
    figure = interval_rows(
        rows,
        row="row",
        series="series",
        value="rho",
        title="Do scores rank single values as the loss does?",
        subtitle=where,
        x_title="rank correlation with |change in loss|",
        level=0.0,
    )
    values = correlations.loc[correlations["among"] == "all", "n"].max()
    return with_caption(
        figure,
        f"Spearman's rank correlation of token scores with the size of the change in loss when one "
        f"value alone is masked; {where}; {values:,} values. Bars: 95 % bootstrap intervals over "
        "values, which share texts and layers. Not in the paper.",
        recipe,
    )


def accuracy_figure(
    accuracy: pd.DataFrame, task: str, remove: str, model: str, *, recipe: str | None = None
) -> go.Figure:
    """Accuracy on one task against the fraction removed, over the line of the unmasked run.

    Args:
        accuracy: of `accuracy_table`.
        task: its name.
        remove: "highest" or "lowest".
        model: its name.
        recipe: the command that makes the figure again.
    """
    held = accuracy.loc[accuracy["task"] == task]
    clean = held.loc[held["fraction"] == 0].to_dict("records")[0]
    rows = held.loc[held["remove"] == remove]
    rows = rows.rename(columns={"accuracy_low": "low", "accuracy_high": "high"}).drop(columns="n")
    where = f"{model}, {task}, {clean['n']} questions"
    figure = interval_lines(
        rows,
        x="fraction",
        series="metric",
        value="accuracy",
        title=f"Accuracy, the {remove} removed",
        subtitle=where,
        x_title="(head, token) pairs removed, share of the eligible",
        y_title="accuracy",
        level=float(clean["accuracy"]),
    )
    end = float(rows["fraction"].max()) * 1.04 + 0.005
    figure.update_xaxes(tickformat=".0%", range=[0, end])
    return with_caption(
        figure,
        f"Share of questions answered rightly after the {remove}-ranked pairs were removed; "
        f"{where}. Line: nothing removed, {clean['accuracy']:.3f}. Bars: Wilson's 95 % intervals "
        "over questions.",
        recipe,
    )
