"""Results as plotly figures, and as the files that a paper or a page takes."""

from cw_lens.figures.curves import curve_figures
from cw_lens.figures.files import WrittenFigures, write_figures
from cw_lens.figures.geometry import (
    alignment_figure,
    cone_figure,
    cone_shares,
    norm_figure,
    norm_overview,
    sink_components,
)
from cw_lens.figures.sweeps import surgery_figure, sweep_figure

__all__ = [
    "WrittenFigures",
    "alignment_figure",
    "cone_figure",
    "cone_shares",
    "curve_figures",
    "norm_figure",
    "norm_overview",
    "sink_components",
    "surgery_figure",
    "sweep_figure",
    "write_figures",
]
