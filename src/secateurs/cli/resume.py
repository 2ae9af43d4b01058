"""`secateurs resume`: goes on where a run or a training stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from secateurs.cli.flags import Json
from secateurs.cli.inputs import check_device, fresh_model, load_data, origin_of
from secateurs.cli.progress import RunWatcher, display
from secateurs.cli.results import follow, holding, print_outcome, print_run_json
from secateurs.cli.train import resume_training
from secateurs.cli.training_folder import is_training


def resume(
    run: Path,
    *,
    device: Annotated[str | None, Parameter(show_default="as the run was started")] = None,
    as_json: Json = False,
) -> None:
    """Go on with a run of `secateurs prune`, or a training of `secateurs train`, that was interrupted or killed.

    Model, data and recipe are those it was started with; the outcome is the one it would have had. A run that is finished is
    shown once more.

    Parameters
    ----------
    run
        The folder.
    device
        Where to compute.
    as_json
        Print one JSON document on stdout, and no progress.
    """
    if is_training(run):
        resume_training(run, device=device, as_json=as_json)
        return
    from secateurs.record import read_provenance
    from secateurs.run import resume as take_up

    origin = origin_of(read_provenance(run).get("origin", {}), run)
    device = device or origin.device
    check_device(device)
    examples = load_data(origin)
    with display(quiet=as_json) as shown:
        # the watcher needs the steps that lie behind, which the run only knows once it is taken up
        watchers: list[RunWatcher] = []
        taken = take_up(run, fresh_model(origin), examples, device=device, watch=lambda event: watchers[0].watch(event))
        watchers.append(RunWatcher(shown, taken.recipe, taken.steps))
        with holding(taken, run):
            shown.line(f"Going on with {run}: {len(taken.steps)} steps are done")
            outcome = follow(taken, watchers[0])
    if as_json:
        print_run_json(run, taken, outcome)
    else:
        print_outcome(run, outcome)
