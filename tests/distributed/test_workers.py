"""Several workers: the same bits as one process, every ticket once, and trouble of one rank is an error that names it.

Most workers here are forked (tests/worker_processes.py); torchrun itself starts those that are killed and restarted.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
QUICK = [
    *("folders", "number", "large", "late", "dies", "fails once", "fails", "memory", "refuses", "elsewhere", "absent"),
    *("other weights", "other data", "other recipe", "other version"),
    *("restarted tickets", "restarted masks"),
]
LONG = [
    "best",
    "network",
    "paper",
    "fast",
    "trained run",
    "training",
    "frozen",
    "mixed",
    "other norms",
    "other network",
    "told its rank",
    "trains apart",
    "alone",
    "restarted curves",
]
TICKETS = [ticket + 0.5 for ticket in range(12)]


def environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT / "lab"), str(TESTS), str(ROOT)]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def run_cases(root: Path, names: list[str]) -> dict[str, Any]:
    command = [sys.executable, str(TESTS / "worker_processes.py"), str(root), *names]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Made once, by the first process of the test run that comes here."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    root, found = base / "workers", base / "workers.json"
    with (base / "workers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            root.mkdir()
            found.write_text(json.dumps(run_cases(root, QUICK)))
    return {**json.loads(found.read_text()), "root": root}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(tmp_path_factory.mktemp("workers"), LONG)


def errors(case: list[dict[str, Any]]) -> list[str]:
    return [one.get("error", f"no error: {one}") for one in case if one]


def all_equal(runs: list[list[dict[str, Any]]]) -> bool:
    (first, *_), *_ = runs
    return "plan" in first and bool(first["removed"]) and all(one == first for run in runs for one in run)


# ---- the same bits -------------------------------------------------------------------------------------------------------


def test_folders_of_one_and_two_workers_hold_the_same_importances_curves_and_plan(quick: dict[str, Any]) -> None:
    from torture.runs import differing_file, without_times

    one, two = (quick["root"] / name for name in ("1", "2"))
    assert errors(quick["folders"][1]) == [f"no error: {found}" for found in quick["folders"][1]]
    assert differing_file(one, two) is None
    assert without_times(one) == without_times(two)
    names = sorted(path.name for path in (one / "ensembles").iterdir())
    assert len(names) >= 4
    assert names == sorted(path.name for path in (two / "ensembles").iterdir())
    for name in names:
        from secateurs._util.tensors import parse

        (ours, _), (theirs, _) = (parse((root / "ensembles" / name).read_bytes()) for root in (one, two))
        assert all(bool((ours[key] == theirs[key]).all()) for key in ours), name
        assert ours.keys() == theirs.keys() >= {"coef", "masks", "losses"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["best", "network", "paper", "fast", "trained run"])
def test_plans_and_weights_do_not_depend_on_the_number_of_workers(long: dict[str, Any], name: str) -> None:
    """With training, all workers of one run have the same weights, but not those of another number of workers."""
    assert all_equal(long[name]), long[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["training", "frozen", "mixed", "other norms"])
def test_training_takes_the_steps_of_the_whole_batch(long: dict[str, Any], name: str) -> None:
    """In float64 with BatchNorm live or frozen: what one process computes, up to rounding; 50 does not divide by 3."""
    ((alone,), *others) = long[name]
    for run in others:
        assert all(one["value"] == run[0]["value"] for one in run)
        assert max(abs(a - b) for a, b in zip(alone["value"], run[0]["value"], strict=True)) < 1e-12


# ---- tickets -------------------------------------------------------------------------------------------------------------


def test_every_ticket_is_answered_once_and_all_workers_get_all_in_order(quick: dict[str, Any]) -> None:
    for name, wanted in (("number", TICKETS), ("large", [40_000.0 * ticket for ticket in range(12)])):
        found = [one["value"] for one in quick[name]]
        assert all(one["found"] == wanted for one in found)
        assert sorted(ticket for one in found for ticket in one["mine"]) == list(range(12))


def test_a_slow_worker_costs_one_ticket(quick: dict[str, Any]) -> None:
    fast, slow = (one["value"] for one in quick["late"])
    assert fast["found"] == slow["found"] == TICKETS
    assert len(slow["mine"]) < 4 < len(fast["mine"])


def test_a_ticket_that_fails_is_drawn_again(quick: dict[str, Any]) -> None:
    found = [one["value"] for one in quick["fails once"]]
    assert all(one["found"] == TICKETS for one in found)
    assert sorted(ticket for one in found for ticket in one["mine"]).count(3) > 1


def test_a_ticket_that_always_fails_is_an_error_everywhere(quick: dict[str, Any]) -> None:
    assert len(errors(quick["fails"])) == 2
    assert all("ticket 3 of 12 failed 5 times" in each and "the disk is gone" in each for each in errors(quick["fails"]))


def test_our_own_errors_come_at_once_and_name_the_rank(quick: dict[str, Any]) -> None:
    assert max(one["seconds"] for one in quick["refuses"]) < 20
    found = sorted(errors(quick["refuses"]))
    assert found[0] == "InvalidInput: ticket 3 is wrong"
    assert found[1].startswith("RunError: rank ")
    assert found[1].endswith("failed: ticket 3 is wrong")


def test_where_one_worker_runs_out_of_memory_all_do(quick: dict[str, Any]) -> None:
    assert [each.split(":")[0] for each in errors(quick["memory"])] == ["OutOfMemoryError"] * 2


# ---- trouble -------------------------------------------------------------------------------------------------------------


def test_a_rank_that_draws_a_ticket_and_dies_is_named_with_it(quick: dict[str, Any]) -> None:
    (found,) = errors(quick["dies"])
    assert "waited 1.5 s for rank 1 (drew ticket" in found
    assert quick["dies"][0]["seconds"] < 10


def test_a_rank_that_does_something_else_is_named(quick: dict[str, Any]) -> None:
    assert "rank 1 is at 'losses', and rank 0 at 'curves'" in errors(quick["elsewhere"])[0]
    assert "rank 0 is at 'curves', and rank 1 at 'losses'" in errors(quick["elsewhere"])[1]


def test_a_rank_that_never_comes_ends_the_wait(quick: dict[str, Any]) -> None:
    assert "rank 0 could not join the other workers" in errors(quick["absent"])[0]


@pytest.mark.parametrize(
    ("case", "what"),
    [("weights", "network"), ("data", "data"), ("recipe", "recipe"), ("version", "version of secateurs")],
)
def test_a_rank_with_something_else_is_named_before_the_run(quick: dict[str, Any], case: str, what: str) -> None:
    found = errors(quick[f"other {case}"])
    assert len(found) == 2
    assert all(f"before the run: rank 1 has another {what} than rank 0" in each for each in found)


@pytest.mark.slow
def test_a_network_that_comes_to_differ_is_named_after_the_cut(long: dict[str, Any]) -> None:
    found = errors(long["other network"])
    assert len(found) == 3
    assert all("after the cut at site" in each and "rank 1 has another network" in each for each in found)


@pytest.mark.slow
def test_own_training_runs_on_all_ranks_and_is_told_its_own(long: dict[str, Any]) -> None:
    for rank, one in enumerate(long["told its rank"]):
        assert one["value"]["told"] == [[rank, 2]] * len(one["value"]["told"])
        assert one["value"]["told"]
    assert all("which must leave the same weights on all workers" in each for each in errors(long["trains apart"]))


@pytest.mark.slow
def test_one_process_of_two_may_prune_alone(long: dict[str, Any]) -> None:
    assert long["alone"][0]["value"] == long["fast"][0][0]


# ---- what a restart finds ------------------------------------------------------------------------------------------------


def test_a_killed_worker_loses_only_the_ticket_that_it_had_drawn(quick: dict[str, Any]) -> None:
    """Rank 1 was killed in its fourth ticket; one file was damaged afterwards, and three workers went on."""
    found = quick["restarted tickets"]
    before, after = found["first"], [one["value"] for one in found["second"]]
    assert before[1] == {}
    assert "waited 1.5 s for rank 1 (drew ticket" in before[0]["error"]
    assert found["files"] == 11
    assert len([ticket for one in after for ticket in one["mine"]]) == 2
    assert all(one["found"] == TICKETS for one in after)
    assert not found["left"]


def test_a_restarted_run_measures_no_masks_again(quick: dict[str, Any]) -> None:
    no_answer_is_computed_again(quick["restarted masks"])


@pytest.mark.slow
def test_a_restarted_run_measures_no_curve_again(long: dict[str, Any]) -> None:
    no_answer_is_computed_again(long["restarted curves"])


def no_answer_is_computed_again(found: dict[str, Any]) -> None:
    assert found["left by the kill"] > 1
    assert not set(found["before"]) & set(found["after"])
    assert sorted(found["before"] + found["after"]) == sorted(found["whole"])
    assert not found["left"]
    whole, again = ([one["value"] for one in run] for run in found["runs"])
    assert whole == again
    assert whole[0] == whole[1]


# ---- torchrun ------------------------------------------------------------------------------------------------------------


def processes_of(word: str) -> list[str]:
    """Command lines of all processes that mention a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if word in text:
            found.append(text)
    return found


def torchrun(
    *command: str, workers: int = 2, restarts: int = 0, machines: Sequence[str] = ("--standalone",)
) -> subprocess.Popen[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", *machines, f"--nproc-per-node={workers}"]
    launch += [f"--max-restarts={restarts}", "--monitor-interval=0.1", "-m", *command]
    pipe = subprocess.PIPE
    return subprocess.Popen(launch, env=environment(), text=True, stdout=pipe, stderr=pipe, start_new_session=True)


def children(agent: subprocess.Popen[str]) -> list[int]:
    return [int(child) for child in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]


PRUNE = ["secateurs", "prune", "--model", "mlp", "--data", "digits", "--recipe", "best", "--confidence", "0", "--round-to", "1"]


@pytest.mark.slow
def test_torchrun_prunes_as_one_process_does_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    """The first rank to be killed is rank 0, which has the folder."""
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    command = [sys.executable, "-m", *PRUNE, "--out", str(alone)]
    subprocess.run(command, env=environment(), capture_output=True, check=True, timeout=120)
    agent = torchrun(*PRUNE, "--out", str(killed), restarts=2)
    try:
        until = time.monotonic() + 120
        while not (killed / "checkpoints" / "start.safetensors").exists():
            assert agent.poll() is None, agent.communicate()[1][-2000:]
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(children(agent)[0], signal.SIGKILL)
        out, err = agent.communicate(timeout=120)
    finally:
        agent.kill()
    assert agent.returncode == 0, err[-2000:]
    for name in ("plan.json", "pruned.safetensors"):
        assert (alone / name).read_bytes() == (killed / name).read_bytes(), name
    assert out.count("pruned.safetensors") == 1, "only rank 0 prints"
    assert "Resuming" not in out
    assert not processes_of(str(killed))


@pytest.mark.slow
def test_a_machine_that_is_lost_leaves_a_run_that_the_others_finish(tmp_path: Path) -> None:
    """Two agents that meet at one address stand for two machines; all processes of one are killed at once."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    meeting = ("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=run")
    meeting = (*meeting, "--rdzv-conf=last_call_timeout=20,keep_alive_interval=1")
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    subprocess.run([sys.executable, "-m", *PRUNE, "--out", str(alone)], env=environment(), capture_output=True, check=True)
    agents = [torchrun(*PRUNE, "--out", str(shared), workers=1, restarts=3, machines=meeting) for _ in range(2)]
    host = None
    try:
        until = time.monotonic() + 120
        while not (shared / "checkpoints" / "start.safetensors").exists():
            assert all(agent.poll() is None for agent in agents)
            assert time.monotonic() < until
            time.sleep(0.01)
        ranks = [Path(f"/proc/{children(agent)[0]}/environ").read_bytes().split(b"\0") for agent in agents]
        assert all(b"WORLD_SIZE=2" in found for found in ranks)
        host = next(agent for agent in agents if is_listening(agent.pid, port))  # who keeps the store is not the one to go
        (lost,) = (agent for agent in agents if agent is not host)
        for process in (*children(lost), lost.pid):
            os.killpg(process, signal.SIGKILL)  # each leads its own session
        lost.communicate(timeout=60)
        _, err = host.communicate(timeout=180)
    finally:
        for agent in agents:
            agent.kill()
    assert host.returncode == 0, err[-2000:]
    for name in ("plan.json", "pruned.safetensors"):
        assert (alone / name).read_bytes() == (shared / name).read_bytes(), name
    assert not processes_of(str(shared))


def is_listening(process: int, port: int) -> bool:
    """Whether a process has the socket that listens at a port."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    inodes = {f"socket:[{line[9]}]" for line in lines if line[3] == "0A" and int(line[1].rpartition(":")[2], 16) == port}
    return any(os.readlink(path) in inodes for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink())


@pytest.mark.slow
def test_two_workers_of_torchrun_share_a_table_without_making_a_row_twice(tmp_path: Path) -> None:
    from comparisons import places
    from secateurs_lab.compare.run import ROWS

    command = ["secateurs", "compare", "--model", "mlp", "--data", "digits", "--methods", "l2", "--targets", "0.2", "0.4"]
    agent = torchrun(*command, "--examples", "64", *places(tmp_path))
    _, err = agent.communicate(timeout=300)
    assert agent.returncode == 0, err[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / ROWS).read_text().splitlines()]
    made = [(row["method"], row["target"], row["seed"]) for row in rows]
    assert len(made) == len(set(made)) > 4


@pytest.mark.slow
def test_runs_whose_ranks_are_killed_at_random_end_with_the_same_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "lab"))
    from benchmarks import workers

    rows = list[dict[str, Any]]()
    found = workers.kills(5, 2, 600, environment(), rows.append)
    assert found["kills"] >= 3
    assert found["lost"] == found["processes left behind"] == 0, rows
    assert found["same"] == found["runs"], rows
