"""The command line `citer`; `jobs/*.py` run the same commands. `main` turns errors into messages and exit codes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer
from rich.console import Console
from rich.logging import RichHandler

from citer_ray.errors import CiterError
from citer_ray.redaction import RedactingFilter, redact
from citer_ray.storage import store_failure

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 on success, 2 on a user's error, 130 on Ctrl-C and on SIGTERM, 1 on a bug."""
    from citer_ray.cli.app import app  # Typer builds the commands here, not on import of the package

    stderr = Console(stderr=True)
    handler: logging.Handler
    if stderr.is_terminal:
        handler = RichHandler(console=stderr, show_path=False, show_time=False, rich_tracebacks=False)
    else:  # the log of a job: a line is a line, however long
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)-8s %(message)s"))
    handler.addFilter(RedactingFilter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("citer_ray").setLevel(logging.INFO)
    try:
        result = app(args=list(sys.argv[1:] if argv is None else argv), standalone_mode=False)
    except CiterError as error:
        _fail(stderr, str(error))
    except (KeyboardInterrupt, typer.Abort):
        result = EXIT_INTERRUPTED
    except Exception as error:
        # Typer's own errors know how to show themselves; anything else is a bug and keeps its traceback.
        show = getattr(error, "show", None)
        if show is None:
            if (reason := store_failure(error)) is not None:
                _fail(stderr, reason)
            raise
        show()
        sys.exit(getattr(error, "exit_code", EXIT_USER_ERROR))
    if result == EXIT_INTERRUPTED:  # Typer turns Ctrl-C into this status by itself
        stderr.print("interrupted; what is finished is kept: run the same command again to go on")
    sys.exit(result if isinstance(result, int) else 0)


def _fail(stderr: Console, message: str) -> NoReturn:
    """Say what is wrong, in one line also in the log of a job, and exit."""
    stderr.print("error:", style="bold red", end=" ")
    stderr.print(redact(message), markup=False, highlight=False, soft_wrap=True)
    sys.exit(EXIT_USER_ERROR)
