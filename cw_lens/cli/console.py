"""Where the command line prints, and how it shows that it is at work."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# names may hold what looks like markup or emoji codes: nothing printed is read as such
console = Console(markup=False, emoji=False)
errors = Console(stderr=True, markup=False, emoji=False)


def progress_bar() -> Progress:
    """A bar with what is done of how many, and the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
