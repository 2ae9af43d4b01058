"""Workers as torchrun starts them, without torchrun: forked from one process that has imported torch, each with its rank.

Starting torchrun takes seconds, a fork milliseconds. Nobody outlives the call.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from secateurs.distributed import workers as module


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_workers(
    size: int, work: Callable[[int], Any], *, restart: int = 0, timeout: float = 60.0, seconds: float = 120.0
) -> list[dict[str, Any]]:
    """Call `work(rank)` in `size` processes; gives for each {"value": …} or {"error": message}, or {} if it died.

    `timeout` is how long they wait for one another, `seconds` how long all of them may take.
    """
    port, pids, pipes = free_port(), [], []
    for rank in range(size):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reading)
                environment = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": restart}
                os.environ |= {name: str(value) for name, value in {**environment, module.TIMEOUT: timeout}.items()}
                try:
                    found = {"value": work(rank)}
                    status = 0
                except Exception as error:
                    found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
                os.write(writing, json.dumps(found).encode())
                if rank == 0 and size > 1:  # it has the store: others may still be reading
                    time.sleep(0.3)
            finally:
                os._exit(status)
        os.close(writing)
        pids.append(pid)
        pipes.append(reading)
    found, until = [], time.monotonic() + seconds
    try:
        for pipe in pipes:
            with os.fdopen(pipe, "rb") as file:
                os.set_blocking(pipe, False)
                text = b""
                while time.monotonic() < until:
                    piece = file.read()
                    if piece == b"":
                        break
                    text += piece or b""
                    time.sleep(0.005)
                found.append(json.loads(text) if text else {})
    finally:
        for pid in pids:
            if time.monotonic() >= until:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return found


def pruned(folder: Path | None, recipe: Any, **options: Any) -> dict[str, str]:
    """Prune a small network on digits; the digests of plan and weights, and of the orders of filters."""
    import torch

    from secateurs._util.tensors import digest
    from secateurs.api import start_or_continue
    from torture.runs import few_digits, perceptron

    torch.set_num_threads(1)
    model = options.pop("model", None) or perceptron()
    run = start_or_continue(model, options.pop("data", None) or few_digits(384), recipe=recipe, folder=folder, **options)
    result = run.finish()
    return {
        "plan": result.graph.plan.to_json(),
        "weights": digest(dict(result.graph.module.state_dict())),
        "steps": str(len(result.steps)),
        "search": repr(result.search),
    }


if __name__ == "__main__":
    sys.exit("a module of tests")
