"""`cw-lens report`: one page of all studies in a folder."""

from pathlib import Path
from typing import Annotated

import tyro

from cw_lens.cli.console import console


def report(
    folder: Annotated[Path, tyro.conf.Positional] = Path("runs"),
    /,
    *,
    out: Path | None = None,
) -> None:
    """Join the studies that a folder holds into one page, from their tables; no model is run.

    The page has contents, the verdict of each study, its figures, its tables, which sort and
    download as CSV, its certificates, and the command that makes it again. Runs that are broken or
    not finished are named and left out.

    Args:
        folder: A run folder, or a folder that holds several, up to three folders below it.
        out: The page; by default report.html in the folder.
    """
    with console.status("reading tables and drawing"):
        from cw_lens.report import write_report

        joined = write_report(folder, out)
    for run, command in joined.runs:
        console.print(f"{command}: {run}", soft_wrap=True)
    for why in joined.broken:
        console.print(f"left out: {why}", soft_wrap=True)
    console.print(f"page: {joined.path.resolve()}", soft_wrap=True)
