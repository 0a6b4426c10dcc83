"""The command line. Heavy imports wait until a command runs, so that --help is quick."""

import logging
import sys
import warnings

import tyro
from rich.logging import RichHandler

from cw_lens.cli.console import console, errors
from cw_lens.cli.doctor import doctor
from cw_lens.cli.explain import explain
from cw_lens.cli.faithfulness import faithfulness
from cw_lens.cli.paper import paper
from cw_lens.cli.report import report
from cw_lens.cli.sinks import sinks
from cw_lens.cli.tasks import tasks
from cw_lens.cli.validate import validate
from cw_lens.errors import CWLensError, CWLensWarning


def version() -> None:
    """Print the version."""
    import cw_lens

    console.print(cw_lens.__version__, highlight=False)


def main() -> None:
    """Entry point of `cw-lens`: one clear line and exit code 1 for what a person can mend."""
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=errors)]
    )
    logging.getLogger("cw_lens").setLevel(logging.INFO)
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", CWLensWarning)
    warnings.showwarning = lambda message, *_: errors.print(
        f"cw-lens: {message}", style="yellow", markup=False, soft_wrap=True
    )
    try:
        tyro.extras.subcommand_cli_from_dict(
            {
                "explain": explain,
                "faithfulness": faithfulness,
                "validate": validate,
                "tasks": tasks,
                "sinks": sinks,
                "paper": paper,
                "report": report,
                "doctor": doctor,
                "version": version,
            },
            prog="cw-lens",
            description=__doc__,
        )
    except CWLensError as error:
        errors.print(f"cw-lens: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        errors.print("cw-lens: interrupted; nothing was written that is not whole")
        sys.exit(130)
