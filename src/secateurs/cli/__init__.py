"""The console command `secateurs`: a file for each family of commands, which parse, call the library and print.

Nothing here imports torch before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

from cyclopts import App, Parameter

from secateurs._util.extensions import LAB, added, lab_hint
from secateurs.cli.trust import NotRepeated
from secateurs.errors import InvalidInput, SecateursError

DONE, ERROR, USAGE, INTERRUPTED = 0, 1, 2, 130

_HELP = """\
Make trained PyTorch networks smaller: remove whole filters and neurons, within the accuracy that you allow.

To try it, without any download:  `secateurs demo`

Your own network:  `secateurs prune --model mypackage.networks:build --data mypackage.data:loaders`

Every run writes all it does to a folder (`runs/…`). After Ctrl-C or a crash, `secateurs resume RUN` continues it, with the same
result.
"""

_EXIT_CODES = """\
Exit codes: 0 done; 1 error, with a message on stderr; 2 wrong usage; 130 interrupted, continue with `secateurs resume RUN`.
With `--json` stdout holds one JSON document and nothing else.
"""

_HELP_WITHOUT_IMPORT = {"reproduce": "Run the paper's experiments again and print its tables beside ours."}
"""Help of a command of the lab whose file imports torch."""


def _app() -> App:
    from secateurs.cli import export, network, prune, results, train

    found = App(
        name="secateurs",
        help=_HELP,
        help_epilogue=_EXIT_CODES,
        help_format="markdown",
        version=_version,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    first: tuple[Callable[..., None], ...] = (prune.demo, prune.prune, prune.resume, results.show, network.sites, train.train)
    others: tuple[Callable[..., None], ...] = (export.export, results.report)
    for place, command in enumerate(first):
        found.command(command, sort_key=place)
    found.command(network.evaluate, name="eval", sort_key=6)
    for command in others:
        found.command(command, sort_key=7)
    found.command(train.data_app)
    for name, entry in added("commands").items():
        found.command(entry.value, name=name, help=_HELP_WITHOUT_IMPORT.get(name), sort_key=8)
    for name in set(LAB["commands"]) - added("commands").keys():
        found.command(_missing(name), name=name, show=False)
    return found


def _missing(name: str) -> Callable[..., None]:
    """The command of the lab in its absence."""

    def refuse(*_: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
        raise InvalidInput(f"secateurs {name}:{lab_hint('commands', name)}")

    return refuse


def _version() -> str:
    from importlib.metadata import version  # takes long to import

    return version("secateurs")


app = _app()


def main() -> None:
    """Run the command line of this process, and exit."""
    sys.exit(execute(sys.argv[1:]))


def execute(tokens: Sequence[str]) -> int:
    """Run one command line and return its exit code; error messages go to stderr."""
    try:
        app(list(tokens))
        sys.stdout.flush()
        return DONE
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else USAGE
    except KeyboardInterrupt as stop:
        message, code = str(stop) or "Interrupted.", INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has closed it: point stdout elsewhere, or Python complains again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    except NotRepeated as error:
        message, code = f"Error: {error}\nThe whole command: {shlex.join(['secateurs', *tokens, *error.flags])}", ERROR
    except (SecateursError, OSError) as error:
        message, code = f"Error: {error}", ERROR
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        message = f"rank {os.environ.get('RANK', '0')}: {message}"
    sys.stderr.write(f"{message}\n")
    return code
