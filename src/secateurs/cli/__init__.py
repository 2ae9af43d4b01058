"""The console command `secateurs`: one file a command, each parses, calls the library and prints.

Nothing here imports torch before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from cyclopts import App

from secateurs.errors import SecateursError

DONE, ERROR, USAGE, INTERRUPTED = 0, 1, 2, 130

_HELP = """\
Make trained PyTorch networks smaller: remove whole filters and neurons, within the accuracy that you allow.

A first look, without any download:  `secateurs demo`

Your own network:  `secateurs prune --model mypackage.networks:build --data mypackage.data:loaders`

Every run keeps all it does in a folder (`runs/…`). Stop it with Ctrl-C, or kill it: `secateurs resume RUN` goes on, and ends
with the same network.
"""

_EXIT_CODES = """\
Exit codes: 0 done; 1 error, with a message on stderr; 2 wrong usage; 130 interrupted, go on with `secateurs resume RUN`.
With `--json` stdout holds one JSON document and nothing else.
"""


def _app() -> App:
    from secateurs.cli import compare, data, export, prune, show, train
    from secateurs.cli import network as measuring
    from secateurs.cli import network as sites
    from secateurs.cli import prune as demo
    from secateurs.cli import prune as resume
    from secateurs.cli import show as report

    found = App(
        name="secateurs",
        help=_HELP,
        help_epilogue=_EXIT_CODES,
        help_format="markdown",
        version=lambda: version("secateurs"),
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    commands: tuple[Callable[..., None], ...] = (demo.demo, prune.prune, resume.resume, show.show, sites.sites, train.train)
    for place, command in enumerate(commands):
        found.command(command, sort_key=place)
    found.command(measuring.evaluate, name="eval", sort_key=6)
    found.command(export.export, sort_key=7)
    found.command(report.report, sort_key=7)
    found.command(compare.compare, sort_key=7)
    found.command(data.app)
    # by name, and with its help told here, because its file imports torch
    text = "Run the paper's experiments again and print its tables beside ours."
    found.command("secateurs.reproduce.cli:app", name="reproduce", help=text, sort_key=8)
    return found


app = _app()


def main() -> None:
    """Run the command line of this process, and exit."""
    sys.exit(execute(sys.argv[1:]))


def execute(tokens: Sequence[str]) -> int:
    """Run one command line; gives the exit code, after the message has been written to stderr."""
    try:
        app(list(tokens))
        sys.stdout.flush()
        return DONE
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else USAGE
    except KeyboardInterrupt as stop:
        return _say(str(stop) or "Interrupted.", INTERRUPTED)
    except BrokenPipeError:
        # whoever read our output has closed it: point stdout elsewhere, or Python complains again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    except (SecateursError, OSError) as error:
        return _say(f"Error: {error}", ERROR)


def _say(message: str, code: int) -> int:
    sys.stderr.write(f"{message}\n")
    return code
