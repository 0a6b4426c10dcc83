"""What contributions are made of and where they gather, as figures (paper, figures 7 and 12)."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cw_lens.figures.panels import interval_lines, interval_rows, with_caption
from cw_lens.figures.style import dress, plain
from cw_lens.theme import SEQUENTIAL

FACTORS = {
    "attention": "α",
    "relative_norm": "||v W_O|| / ||o||",
    "cosine": "cosine",
    "contribution": "|c|",
}


def regression_figure(
    regressions: pd.DataFrame, where: str, *, recipe: str | None = None
) -> go.Figure:
    """Tables 1 and 3: held-out R² of contributions on one factor or a product of two.

    Args:
        regressions: of `Components`, one corpus.
        where: model and corpus, as plain text.
        recipe: the command that makes the figure again.
    """
    table = regressions.loc[regressions["scale"] == "raw"]
    names = {"all": "all keys", "first": "first key", "other": "other keys"}
    table = table.assign(
        series=table["keys"].map(names),
        value=table["r2"],
        n=table["texts"],
        words=[name.replace("_", " ").replace("*", "×") for name in table["regressor"]],
    )
    figure = interval_rows(
        table,
        row="words",
        series="series",
        title="What contributions are made of",
        subtitle=where,
        x_title="R² of a linear regression of c, held out",
        level=0.0,
    )
    figure.update_xaxes(range=[min(-0.05, float(table["value"].min()) * 1.1), 1.03])
    return with_caption(
        figure,
        f"Held-out R², mean over five folds; {where}. Bars: 95 % bootstrap intervals over texts. "
        "Compare table 1 of the paper (arXiv 2606.07604).",
        recipe,
    )


def joint_figure(joint: pd.DataFrame, where: str, *, recipe: str | None = None) -> go.Figure:
    """Figure 7: joint distributions of the factors, of all keys.

    Args:
        joint: of `Components`, one corpus and one kind of keys.
        where, recipe: as `regression_figure`.
    """
    pairs = list(joint[["x", "y"]].drop_duplicates().itertuples(index=False, name=None))
    figure = make_subplots(1, len(pairs), horizontal_spacing=0.15)
    for place, (x, y) in enumerate(pairs, start=1):
        rows = joint.loc[(joint["x"] == x) & (joint["y"] == y)]
        edges = {
            axis: np.unique(rows[[f"{axis}_low", f"{axis}_high"]].to_numpy()) for axis in ("x", "y")
        }
        grid = rows.pivot(index="y_low", columns="x_low", values="points")
        # a row or column without a point is drawn empty, not left out
        grid = grid.reindex(index=edges["y"][:-1], columns=edges["x"][:-1])
        figure.add_trace(
            go.Heatmap(
                x=edges["x"].tolist(),
                y=edges["y"].tolist(),
                z=[[None if np.isnan(v) else v for v in row] for row in np.log10(grid.to_numpy())],
                colorscale=SEQUENTIAL,
                showscale=place == len(pairs),
                colorbar={
                    "title": {"text": "edges (log₁₀)", "side": "right", "font": {"size": 11}},
                    "thickness": 10,
                    "tickfont": {"size": 10},
                },
                hovertemplate="%{x:.2f}, %{y:.2f}<br>10^%{z:.1f} edges<extra></extra>",
            ),
            row=1,
            col=place,
        )
        figure.update_xaxes(title_text=_axis(x), row=1, col=place)
        figure.update_yaxes(title_text=_axis(y), title_standoff=2, row=1, col=place)
    dress(figure, "How the factors of contributions go together", where, 0)
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False)
    figure.update_layout(height=330, showlegend=False)
    return with_caption(
        figure,
        f"Edges in each cell, of {joint['points'].sum() // max(1, len(pairs)):,} sampled; {where}. "
        "Logarithms of base 10, the cosine as it is. Compare figure 7 of the paper "
        "(arXiv 2606.07604).",
        recipe,
    )


def first_weight_figure(
    weights: pd.DataFrame, where: str, *, recipe: str | None = None
) -> go.Figure:
    """Table 4 by layer: what the first key receives, by each kind of weight.

    Args:
        weights: of `Concentration`, one corpus.
        where, recipe: as `regression_figure`.
    """
    figure = interval_lines(
        weights.dropna(subset=["layer"]),
        x="layer",
        series="weight",
        title="What the first key receives, by depth",
        subtitle=where,
        x_title="layer",
        y_title="mean weight of the first key",
        level=0.0,
    )
    return with_caption(
        figure,
        f"Attention is the mean over heads, the others are shares of the layer; {where}. Bars: "
        "95 % bootstrap intervals over texts. Compare table 4 of the paper (arXiv 2606.07604).",
        recipe,
    )


def amplification_figure(
    amplification: pd.DataFrame, where: str, *, recipe: str | None = None
) -> go.Figure:
    """Figure 12: contribution divided by attention, against the key's position.

    Args:
        amplification: of `Concentration`, one corpus.
        where, recipe: as `regression_figure`.
    """
    rows = amplification.loc[amplification["layer"].isna()]
    rows = rows.assign(
        place=rows["position"] + 1,
        ratio=[name.replace("alpha", "α") for name in rows["ratio"]],
    )
    figure = interval_lines(
        rows,
        x="place",
        series="ratio",
        title="Amplification of attention, by position",
        subtitle=where,
        x_title="position of the key, the first is 1",
        y_title="c / α",
        level=0.0,
    )
    starts = sorted(set(rows["place"].tolist()))
    figure.update_xaxes(type="log", tickvals=starts, ticktext=[str(start) for start in starts])
    return with_caption(
        figure,
        f"All layers and heads; positions in ranges that double, each drawn at its first; {where}. "
        "Bars: 95 % bootstrap intervals over texts. Compare appendix D.6 of the paper (arXiv "
        "2606.07604).",
        recipe,
    )


def _axis(factor: str) -> str:
    name = plain(FACTORS.get(factor, factor))
    return name if factor == "cosine" else f"log₁₀ {name}"
