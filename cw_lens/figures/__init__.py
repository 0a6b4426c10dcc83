"""Results as plotly figures, and as the files that a paper or a page takes."""

from cw_lens.figures.curves import curve_figures
from cw_lens.figures.files import WrittenFigures, write_figures

__all__ = ["WrittenFigures", "curve_figures", "write_figures"]
