"""Results as pages a browser opens from disk: safe, self-contained, sized before they are drawn."""

from cw_lens.views.compare import compare
from cw_lens.views.notebook import forget_libraries
from cw_lens.views.page import Page
from cw_lens.views.show import explain_page, show_heads, show_overview, show_tokens

__all__ = [
    "Page",
    "compare",
    "explain_page",
    "forget_libraries",
    "show_heads",
    "show_overview",
    "show_tokens",
]
