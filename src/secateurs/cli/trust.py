"""What a folder names, and what of it is run: names of this package, and those that the command line repeats.

The folder of a run or a training may come from anybody, and a name in it may lead to any function: `subprocess:call` is one.
So nothing is imported or called by a name from a folder unless the user gives the same name on the command line, with the same
options: with other options a harmless function may do anything.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secateurs._util.decode import Malformed, brief, checked
from secateurs.cli.inputs import Origin, named_origin, options
from secateurs.errors import InvalidInput, RunError, SecateursError

_FUNCTION = re.compile(r"\w+(\.\w+)*:\w+")  # what can be imported; not __main__:f, <locals> or an object's f()


class NotRepeated(RunError):
    """A folder names code that the command line does not repeat; `flags` are what is to be added to it."""

    def __init__(self, message: str, flags: Sequence[str]) -> None:
        super().__init__(message)
        self.flags = tuple(flags)


@dataclass(frozen=True)
class Repeated:
    """What the command line says besides the folder."""

    model: str | None = None
    data: str | None = None
    model_option: Sequence[str] = ()
    data_option: Sequence[str] = ()
    criterion: Sequence[str] = ()


def run_origin(run: Path, given: Repeated, *, resumed: bool = False) -> Origin:
    """How to build the model and data of a run, once its chain of digests is checked.

    From the names that it was started with on the command line, where they are ours or `given` repeats them; for a run that was
    started from Python, from those given. A run that is to be `resumed` may also name criteria.
    """
    from secateurs._util.journal import changed_files, read_records, records_of
    from secateurs.config import read_recipe
    from secateurs.pruning.figures import KINDS, ResultFigures
    from secateurs.pruning.folder import RECIPE, read_provenance

    record = read_provenance(run).get("origin") or {}
    ended = records_of(read_records(run, KINDS), ResultFigures)
    for name, what in changed_files(run, ended[0]) if ended else ():
        if not (run / name).is_file():
            continue  # the command that needs it says what is left
        raise RunError(f"{run / name}: {what}. Restore it from a copy, or start a new run.")
    criteria = [] if ended or not resumed else own_criteria(read_recipe(run / RECIPE))
    if "model" in record:
        return repeated_origin(record, run, given, criteria)
    if given.model is None and (given.data is not None or given.model_option or given.data_option):
        raise InvalidInput(f"{run}: was started from Python: give --model too, as package.module:function.")
    if given.model is None:
        raise _started_from_python(run)
    _refuse_unrepeated(run, _missing_criteria(run, criteria, given.criterion), [])
    return named_origin(given.model, given.data or "", given.model_option, given.data_option)


def repeated_origin(record: Mapping[str, Any], where: Path, given: Repeated, criteria: Sequence[str] = ()) -> Origin:
    """The origin in a folder, all of whose names are ours, or repeated by the command line."""
    try:
        found: Origin = checked(record, Origin)
    except Malformed as error:
        raise RunError(f"{where}: its origin is damaged ({error}). Restore it from a copy, or start a new run.") from error
    missing: list[str] = []
    named: list[str] = []
    for flag, name, settings, ours, again, pairs in (
        ("--model", found.model, found.model_options, _is_our_model, given.model, given.model_option),
        ("--data", found.data, found.data_options, _is_our_data, given.data, given.data_option),
    ):
        again = _absolute(again)
        if again not in (None, name):
            raise _differs(where, flag, name, str(again))
        repeated = options(pairs, f"{flag}-option")
        for key, value in repeated.items():
            if key not in settings or settings[key] != value:
                was = f"{key}={settings[key]}" if key in settings else f"no {key}"
                raise _differs(where, f"{flag}-option", was, f"{key}={value}")
        if not ours(name):
            unrepeated = flags_of(flag, name, settings, where)
            known = {(flag, name)} if again else set()
            known |= {(f"{flag}-option", _pair(where, key, settings[key])) for key in repeated}
            missing += [word for pair in _in_pairs(unrepeated) if pair not in known for word in pair]
            named.append(f"{flag[2:]} {name}")
    missing += _missing_criteria(where, criteria, given.criterion)
    named += [f"criterion {name}" for name in criteria]
    _refuse_unrepeated(where, missing, named, found.folder)
    return found


def own_criteria(recipe: Any) -> list[str]:
    """The criteria of a recipe that are functions of the user's, by module:function."""
    names = (recipe.criterion, *(recipe.portfolio if recipe.criterion == "portfolio" else ()))
    return [name for name in dict.fromkeys(names) if ":" in name]


def resume_with(folder: Path) -> str:
    """How to continue the run or training in a folder: the whole command, or the call in Python."""
    from secateurs.cli.train import is_training, read
    from secateurs.config import read_recipe
    from secateurs.data.drawn import has_drawn
    from secateurs.pruning.folder import RECIPE, call_to_resume, read_provenance

    if is_training(folder):
        return f"Resume with: {_resume_line(folder, read(folder)['origin'])}"
    known, recipe = read_provenance(folder), read_recipe(folder / RECIPE)
    origin, criteria = known.get("origin") or {}, own_criteria(recipe)
    if "model" in origin:
        return f"Resume with: {_resume_line(folder, origin, criteria)}"
    advice = f"It was started from Python. Resume with: {call_to_resume(folder)}"
    if not set(known.get("again", ())) <= {"test"}:
        return advice  # functions that the command line does not take
    reads = known.get("again") or recipe.finetune or recipe.retrain or not has_drawn(folder)
    flags = ["--model", *(["--data"] if reads else []), *(["--criterion"] if criteria else [])]
    where = shlex.quote(str(folder))
    return f"{advice} Or: secateurs resume {where} {' '.join(f'{flag} package.module:function' for flag in flags)}"


def interrupted(folder: Path) -> str:
    """The message after Ctrl-C."""
    try:
        return f"Interrupted. Finished work is kept. {resume_with(folder)}"
    except SecateursError:  # so early that the folder says nothing yet
        return "Interrupted."


def _resume_line(run: Path, record: Mapping[str, Any], criteria: Sequence[str] = ()) -> str:
    """The command that continues what was started on the command line, with all that it must repeat."""
    words = ["secateurs", "resume", str(run)]
    try:
        found: Origin = checked(record, Origin)
        words += [] if _is_our_model(found.model) else flags_of("--model", found.model, found.model_options, run)
        words += [] if _is_our_data(found.data) else flags_of("--data", found.data, found.data_options, run)
        words += _missing_criteria(run, criteria, ())
    except (Malformed, SecateursError):
        pass  # what is wrong is said when it is resumed
    return shlex.join(words)


def flags_of(flag: str, name: str, settings: Mapping[str, Any], where: Path) -> list[str]:
    """The flags that repeat a function of the user's and its options."""
    if not _FUNCTION.fullmatch(name):
        raise RunError(
            f"{where}: names {brief(ascii(name), 80)} as its {flag[2:]}, which is neither ours nor package.module:function. "
            f"Nothing of it was run: the folder is damaged, or not to be trusted."
        )
    pairs = [_pair(where, key, value) for key, value in settings.items()]
    return [flag, name, *(word for pair in pairs for word in (f"{flag}-option", pair))]


def _missing_criteria(where: Path, named: Sequence[str], given: Sequence[str]) -> list[str]:
    """The flags for criteria of a folder that the command line does not repeat."""
    importable = [name for name in named if _FUNCTION.fullmatch(name) and not name.startswith("__main__:")]
    for name in given:
        if name not in named and len(importable) == len(named):
            raise _differs(where, "--criterion", ", ".join(named) or "none of yours", name)
    if len(importable) < len(named) and not given:
        raise InvalidInput(
            f"{where}: its criterion {brief(ascii(named[0]), 80)} was given in Python and cannot be imported. Resume with "
            f"secateurs.resume(folder, model, criterion=…), or on the command line with --criterion package.module:function."
        )
    return [word for name in importable if name not in given for word in ("--criterion", name)]


def _refuse_unrepeated(where: Path, missing: Sequence[str], named: Sequence[str], folder: str = "") -> None:
    if not missing:
        return
    names = " and ".join(named) or " ".join(missing)
    started = f" It was started in {brief(ascii(folder)[1:-1], 120)}." if folder else ""
    raise NotRepeated(
        f"{where}: names code that is not part of secateurs: {names}. It was not run, because a folder may come from "
        f"anybody.{started} If you know this code, repeat it: {shlex.join(missing)}",
        missing,
    )


def _differs(where: Path, flag: str, named: str, given: str) -> InvalidInput:
    return InvalidInput(
        f"{where}: was started with {flag} {brief(ascii(named)[1:-1], 80)}, the command line says {flag} {brief(given, 80)}. "
        f"Repeat what it was started with, or leave it out where that is a name of ours; for other code resume in Python."
    )


def _started_from_python(run: Path) -> RunError:
    return RunError(
        f"{run}: was started from Python, so it does not say how to build its network and data. Name them: --model "
        f"package.module:function (and --model-option, --data). Or go on in Python: secateurs.resume({str(run)!r}, model, …)."
    )


def _is_our_model(name: str) -> bool:
    from secateurs.models import names

    return name in names()


def _is_our_data(name: str) -> bool:
    from secateurs.data import SETS

    return name in SETS or name.startswith("folder:") or not name


def _absolute(data: str | None) -> str | None:
    """A name as an origin has it: the path of a folder of images is absolute there."""
    if data is None or not data.startswith("folder:"):
        return data
    return f"folder:{Path(data.removeprefix('folder:')).absolute()}"


def _pair(where: Path, name: str, value: Any) -> str:
    """An option as the command line takes it; a value that is no plain word is written as TOML."""
    for text in (value if isinstance(value, str) else "", _toml(value)):
        pair = f"{name}={text}"
        if name.isidentifier() and pair.isprintable() and options([pair], "")[name] == value:
            return pair
    raise RunError(f"{where}: its option {brief(ascii(name), 60)} is none of the command line: the folder is damaged.")


def _toml(value: Any) -> str:
    if isinstance(value, str):
        quoted = json.dumps(value, ensure_ascii=False)
        return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value)


def _in_pairs(words: Sequence[str]) -> Iterable[tuple[str, str]]:
    return zip(words[::2], words[1::2], strict=True)
