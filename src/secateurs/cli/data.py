"""`secateurs data`: gets data sets."""

from __future__ import annotations

from collections.abc import Callable

from cyclopts import App

from secateurs.cli.inputs import Json
from secateurs.cli.progress import Display, Status, display
from secateurs.cli.terminal import print_json, say
from secateurs.errors import InvalidInput, suggest

app = App(name="data", help="Get data sets.", sort_key=7)
_MEGABYTE = 1_000_000


@app.command
def get(name: str, *, as_json: Json = False) -> None:
    """Download a data set unless it is there, check it, and say where it is.

    Data is kept in `~/.cache/secateurs/data`, or under `$SECATEURS_HOME`. A download that breaks off goes on where it stopped
    when it is asked for again; what arrives is used only when its checksum fits. digits and xor need no download.

    Parameters
    ----------
    name
        cifar10 (170 MB).
    as_json
        Print one JSON document on stdout, and no progress.
    """
    from secateurs.data import SETS, get_cifar10

    if name in SETS and name != "cifar10":
        raise InvalidInput(f"{name} comes with secateurs: there is nothing to get.")
    if name != "cifar10":
        raise InvalidInput(f"no data set {name!r} to get.{suggest(name, ['cifar10'])}")
    with display(quiet=as_json) as shown:
        folder = get_cifar10(progress=_telling(shown))
    if as_json:
        print_json({"name": name, "folder": str(folder)})
    else:
        say(f"{name} is in {folder}")


def _telling(shown: Display) -> Callable[[int, int | None], None]:
    def tell(done: int, total: int | None) -> None:
        whole = (total or done) // _MEGABYTE
        shown.update(Status("Downloading cifar10", "megabytes", done // _MEGABYTE, whole))

    return tell
