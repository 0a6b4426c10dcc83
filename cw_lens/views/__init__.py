"""Results as pages a browser opens from disk: safe, self-contained, sized before they are drawn."""

from cw_lens.views.page import Page, explain_page

__all__ = ["Page", "explain_page"]
