"""The processes that torchrun started, as workers of one run: tickets, what rank 0 decides, and what all must agree on.

All of them run the same program. A measurement is cut into tickets, which workers draw from a shared counter: a slow worker
draws fewer. Every worker then gets all results in the order of the tickets, so the number of workers changes no bit of a sum.
Rank 0 sends all others what it decides or reads. Every wait times out; the error names the worker that is late or at another
step.

A few bytes go through the store of torch.distributed (TCPStore), more of them through its process group.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateurs.distributed.answers import KeptAnswers, pack, unpack
from secateurs.errors import RunError, SecateursError

TIMEOUT = "SECATEURS_TIMEOUT"  # environment: the longest wait for another worker, in seconds
_SECONDS = 1800.0
_INLINE = 1 << 16  # bytes of results that go through the store
_BEAT, _GONE = 5.0, 60.0  # seconds between two signs of life, and without any, after which a worker is taken to be gone
_ATTEMPTS = 5  # at a ticket that fails with an error that is none of ours: another worker may succeed


@dataclass
class Workers:
    """The workers of a run, as seen by one of them. One process alone has no store, and waits for nobody."""

    rank: int = 0
    size: int = 1
    store: Any = None  # a torch.distributed.Store
    timeout: float = _SECONDS  # seconds that a worker waits for the others
    phase: int = field(default=0, init=False)  # exchanges so far, the same on all workers
    _busy: bool = field(default=False, init=False)  # with a ticket, in which nothing is exchanged
    _read: list[str] = field(default_factory=list, init=False)  # own keys, which are deleted when all have read them
    _kept: KeptAnswers = field(default_factory=KeptAnswers, init=False)
    _keeping: list[str] = field(default_factory=list, init=False)  # names of the blocks of `keeping`, outermost first
    _names: list[str] = field(default_factory=list, init=False)  # of the answers that are kept until the outermost one ends

    @property
    def first(self) -> bool:
        """Whether this is the worker that decides, prints and writes."""
        return self.rank == 0

    @contextmanager
    def active(self, kept: KeptAnswers | None = None) -> Iterator[None]:
        """Share the measurements inside the block among these workers, all of which must do the same there.

        `kept` is where `keeping` keeps answers, of the run that measures.
        """
        _active.append(self)
        before, self._kept = self._kept, kept or KeptAnswers()
        try:
            yield
        finally:
            _active.pop()
            self._kept = before

    # ---- tickets -----------------------------------------------------------------------------------------------------

    def map(
        self,
        what: str,
        count: int,
        work: Callable[[int], Sequence[Tensor]],
        own: Sequence[int] | None = None,
        names: Sequence[str] = (),
    ) -> list[Sequence[Tensor]]:
        """The results of `work(ticket)` for all tickets below `count`, in their order, the same on every worker.

        `what` names the measurement, and must be the same everywhere. A ticket that fails is drawn again, by anybody, unless
        the error is one of ours: that would come again. Where one worker runs out of memory, all of them raise it. With `own`,
        nothing is drawn: these tickets are this worker's, since it has what they need. Tickets with `names` are kept inside a
        block of `keeping`.
        """
        if self.size == 1:
            return [work(ticket) for ticket in range(count)]
        found: dict[int, Sequence[Tensor]] = {}
        left, failed, kept = list(range(count)), "", list[str]()
        if self._keeping and names:
            kept = [" / ".join([*self._keeping, what, name]) for name in names]
            assert not set(kept) & set(self._names), f"{what}: two tickets of one name"
            self._names += kept
        for _ in range(_ATTEMPTS):
            answers, failed = self._round(what, left, work, own, kept)
            found |= answers
            left = [ticket for ticket in left if ticket not in answers]
            if not left:
                return [found[ticket] for ticket in range(count)]
        raise RunError(f"{what}: ticket {left[0]} of {count} failed {_ATTEMPTS} times; {failed}")

    def _round(
        self,
        what: str,
        tickets: Sequence[int],
        work: Callable[[int], Sequence[Tensor]],
        held: Sequence[int] | None,
        kept: Sequence[str],
    ) -> tuple[dict[int, Sequence[Tensor]], str]:
        """Draw some of the tickets until all are drawn; gives what all workers found, and the last failure in words."""
        self.phase += 1
        own, tickets = self._found_on_disk(tickets, kept)
        note, kind = "", ""
        caught: Exception | None = None
        try:
            mine = drawn(self.store, f"{self.phase}", tickets, self.rank) if held is None else (t for t in tickets if t in held)
            for ticket in mine:
                try:
                    self._busy, began = True, time.perf_counter()
                    with ALONE.active():  # what a ticket calls is not shared again
                        own[ticket] = work(ticket)
                    if kept:
                        self._kept.save(kept[ticket], own[ticket], time.perf_counter() - began)
                except (torch.OutOfMemoryError, SecateursError):
                    raise
                except Exception as error:  # of a disk, a driver, a reader: it may not come again
                    note = f"{type(error).__name__}: {error}"
                finally:
                    self._busy = False
        except torch.OutOfMemoryError as error:
            kind, note, caught = "memory", str(error).partition("\n")[0], error
        except SecateursError as error:
            kind, note, caught = "error", str(error), error
        payload = pack([t for tensors in own.values() for t in tensors])
        header = {"what": what, "tickets": [[t, len(tensors)] for t, tensors in own.items()], "kind": kind, "note": note}
        try:
            headers, payloads = self._exchange(header, payload)
        except SecateursError:
            if caught is not None:
                raise caught from None
            raise
        if kind == "error" and caught is not None:
            raise caught
        if any(one["kind"] == "memory" for one in headers):
            raise caught or torch.OutOfMemoryError(f"another worker ran out of memory: {what}")
        found: dict[int, Sequence[Tensor]] = {}
        for rank, (one, tensors) in enumerate(zip(headers, payloads, strict=True)):
            rest = iter(tensors)
            for ticket, parts in one["tickets"]:
                if ticket in found:
                    raise RunError(f"{what}: ticket {ticket} was answered twice, the second time by rank {rank}.")
                found[ticket] = [next(rest) for _ in range(parts)]
        return found, "; ".join(f"rank {rank}: {one['note']}" for rank, one in enumerate(headers) if one["note"])

    def _exchange(self, header: Mapping[str, Any], payload: Tensor) -> tuple[list[dict[str, Any]], list[list[Tensor]]]:
        """Hand the own header and bytes to all, and take theirs; an error names who is missing, failed, or elsewhere."""
        import torch.distributed as dist

        inline = payload if len(payload) <= _INLINE else payload[:0]
        text = json.dumps({**header, "bytes": len(payload)}).encode()
        self._set(f"{self.phase}/done/{self.rank}", len(text).to_bytes(8, "little") + text + inline.numpy().tobytes())
        headers, payloads = list[dict[str, Any]](), list[list[Tensor]]()
        for rank, raw in enumerate(self._get_all(header["what"])):
            length = int.from_bytes(raw[:8], "little")
            headers.append(json.loads(raw[8 : 8 + length]))
            payloads.append([])
            if headers[-1]["kind"] == "error" and rank != self.rank:
                raise RunError(f"rank {rank} failed: {headers[-1]['note']}")
            if headers[-1]["what"] != header["what"]:
                raise RunError(
                    f"rank {rank} is at {headers[-1]['what']!r}, and rank {self.rank} at {header['what']!r}: workers must do "
                    f"the same. Start all of them with the same model, data, options and version."
                )
            if headers[-1]["bytes"] <= _INLINE:
                payloads[-1] = unpack(torch.frombuffer(bytearray(raw[8 + length :]), dtype=torch.uint8))
        if any(one["kind"] for one in headers):  # who failed, and who reads that, sends nothing more
            return headers, payloads
        for rank, one in enumerate(headers):
            if one["bytes"] > _INLINE:
                sent = payload if rank == self.rank else torch.empty(one["bytes"], dtype=torch.uint8)
                with self._lost(f"sending the results of {header['what']!r} from rank {rank}"):
                    dist.broadcast(sent, rank, group=self.group("gloo"))
                payloads[rank] = unpack(sent)
        # all have come here, so all have read what came before
        for key in self._read:
            self._forget(key)
        self._read = [f"{self.phase}/done/{self.rank}", f"{self.phase}/at/{self.rank}"]
        self._read += [f"{self.phase}/next"] if self.first else []
        return headers, payloads

    # ---- answers that a restart finds ---------------------------------------------------------------------------------

    def answers_in(self, folder: Path) -> KeptAnswers:
        """The answers that an attempt that was killed left in a folder, which all workers see."""
        kept = KeptAnswers(folder)
        kept.known = set(json.loads(self.shared("kept answers", lambda: json.dumps(kept.listed()).encode())))
        return kept

    @contextmanager
    def keeping(self, name: str) -> Iterator[None]:
        """Keep the answers of tickets that have names on disk until the block, the outermost one, ends without an error.

        So its end is where a record, or the store of measurements, has what was made of them. The names of the blocks, of the
        measurement and of the ticket together must say all that an answer depends on in this run: workers that are restarted
        read what is there, and do not compute it. One process alone keeps nothing.
        """
        if self.size == 1 or self._kept.folder is None:
            yield
            return
        self._keeping.append(name)
        try:
            yield
        except BaseException:
            self._names = self._names if len(self._keeping) > 1 else []
            raise
        finally:
            self._keeping.pop()
        if not self._keeping:
            if self.first:
                self._kept.remove(self._names)
            self._names = []

    def _found_on_disk(self, tickets: Sequence[int], kept: Sequence[str]) -> tuple[dict[int, Sequence[Tensor]], Sequence[int]]:
        """Answers that rank 0 has read, as its own, and the tickets that are left to draw; damaged ones come again."""
        known = {ticket for ticket in tickets if kept and kept[ticket] in self._kept}
        found: dict[int, Sequence[Tensor]] = {}
        for ticket in sorted(known) if self.first else ():
            if (answer := self._kept.load(kept[ticket])) is not None:
                found[ticket] = answer
        self._kept.forget(kept[ticket] for ticket in known)
        return found, [ticket for ticket in tickets if ticket not in known]

    # ---- decisions and agreement -------------------------------------------------------------------------------------

    def shared(self, what: str, compute: Callable[[], bytes]) -> bytes:
        """What rank 0 computes, on every worker; checked by its SHA-256. Where rank 0 fails, all do."""
        if self.size == 1:
            return compute()
        assert not self._busy, f"{what}: shared within a ticket, which the other workers do not have"
        self.phase += 1
        key = f"{self.phase}/value"
        if self.first:
            try:
                found = compute()
            except BaseException as error:
                self._set(key, json.dumps({"what": what, "error": str(error) or type(error).__name__}).encode() + b"\n")
                raise
            head = {"what": what, "sha256": hashlib.sha256(found).hexdigest()}
            self._set(key, json.dumps(head).encode() + b"\n" + found)
            self._read.append(key)
            return found
        self._wait([key], what, lambda: "rank 0")
        text, _, found = bytes(self._get(key)).partition(b"\n")
        head = json.loads(text)
        if "error" in head:
            raise RunError(f"rank 0 failed: {head['error']}")
        if head["what"] != what:
            raise RunError(
                f"rank 0 is at {head['what']!r}, and rank {self.rank} at {what!r}: workers must do the same. Start all of them "
                f"with the same model, data, options and version."
            )
        if hashlib.sha256(found).hexdigest() != head["sha256"]:
            raise RunError(f"{what}: rank {self.rank} did not get what rank 0 sent. Check the network, and start again.")
        return found

    def check_same(self, what: str, facts: Mapping[str, str]) -> None:
        """Refuse to go on where a fact is not the same on all workers; the error names the first that differs from rank 0."""
        if self.size == 1:
            return
        self.phase += 1
        headers, _ = self._exchange({"what": what, "facts": dict(facts), "kind": "", "note": ""}, pack([]))
        for rank, one in enumerate(headers):
            for name in sorted(facts.keys() | one["facts"].keys()):
                here, there = headers[0]["facts"].get(name), one["facts"].get(name)
                if here != there:
                    raise RunError(
                        f"{what}: rank {rank} has another {name} than rank 0 ({str(there)[:12]}, not {str(here)[:12]}). Start "
                        f"all workers with the same model, weights, data, recipe and version, on machines of one kind."
                    )

    def fail(self, error: BaseException) -> None:
        """Tell the others, who wait for this worker's next answer, that there will be none."""
        if self.size == 1:
            return
        note, key = str(error) or type(error).__name__, self.phase + 1
        with suppress(Exception):
            text = json.dumps({"what": "", "tickets": [], "kind": "error", "note": note, "bytes": 0}).encode()
            for phase in (self.phase, key):
                if not self.store.check([f"{phase}/done/{self.rank}"]):
                    self._set(f"{phase}/done/{self.rank}", len(text).to_bytes(8, "little") + text)
                if self.first and not self.store.check([f"{phase}/value"]):
                    self._set(f"{phase}/value", json.dumps({"what": "", "error": note}).encode() + b"\n")

    def group(self, backend: str = "") -> Any:
        """A process group of all workers, made on the first request: the user's own, if there is one of that backend.

        Without a `backend`, nccl where CUDA is there, else gloo.
        """
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        if not dist.is_initialized():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                store=c10d.PrefixStore("group", self.store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self.timeout),
            )
            _ours.append(True)
            atexit.register(leave)
        if backend == "gloo" and "gloo" not in str(dist.get_backend_config()):
            if not _gloo:
                _gloo.append(dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout)))
            return _gloo[0]
        return dist.group.WORLD

    # ---- the store ---------------------------------------------------------------------------------------------------

    def meet(self) -> str:
        """A name that the workers of this attempt share, and that no other attempt has.

        torchrun may keep one store over restarts, with what dead workers left in it. So every worker says a random number of
        its own, and rank 0 answers each number with its own, until all have confirmed that one.
        """
        own, until = secrets.token_hex(8), time.monotonic() + self.timeout
        if not self.first:
            self._set(f"hello/{self.rank}", own.encode())
            self._wait([f"welcome/{own}"], "joining", lambda: "rank 0")
            name = bytes(self._get(f"welcome/{own}")).decode()
            self._set(f"{name}/here/{self.rank}", b"")
            return name
        missing, answered = set(range(1, self.size)), set[bytes]()
        while missing:
            for rank in sorted(missing):
                with self._lost("joining"):
                    if self.store.check([f"{own}/here/{rank}"]):
                        missing.discard(rank)
                    elif self.store.check([f"hello/{rank}"]) and (said := bytes(self._get(f"hello/{rank}"))) not in answered:
                        answered.add(said)  # of a worker that is gone, perhaps: then nobody reads the answer
                        self._set(f"welcome/{said.decode()}", own.encode())
            if missing and time.monotonic() > until:
                late = ", ".join(f"rank {rank}" for rank in sorted(missing)[:8])
                raise RunError(
                    f"joining: rank 0 waited {self.timeout:g} s for {late}. Start all workers, or allow more time: {TIMEOUT}=…"
                )
            time.sleep(0.01 if missing else 0.0)
        return own

    def _get_all(self, what: str) -> list[bytes]:
        keys = [f"{self.phase}/done/{rank}" for rank in range(self.size)]

        def missing() -> str:
            late = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            named = [f"rank {rank}" + self._where(rank) for rank in late[:8]]
            return ", ".join(named) + (f" and {len(late) - 8} others" if len(late) > 8 else "")

        self._wait(keys, what, missing, range(self.size))
        return [bytes(found) for found in self.store.multi_get(keys)]

    def _where(self, rank: int) -> str:
        """The ticket that a worker drew last in this phase, in words."""
        key = f"{self.phase}/at/{rank}"
        return f" (drew ticket {self._get(key).decode()})" if self.store.check([key]) else ""

    def _wait(self, keys: list[str], what: str, missing: Callable[[], str], ranks: Sequence[int] = (0,)) -> None:
        """Wait for keys, of the workers `ranks`, as long as these show signs of life, and no longer than the time-out."""
        from torch.distributed import DistStoreError

        began, heard = time.monotonic(), dict[int, tuple[bytes, float]]()
        while True:
            left = self.timeout - (time.monotonic() - began)
            try:
                with self._lost(what):
                    self.store.wait(keys, timedelta(seconds=max(min(left, _BEAT), 0.001)))
                return
            except DistStoreError as error:
                if left <= _BEAT:
                    raise RunError(
                        f"{what}: rank {self.rank} waited {self.timeout:g} s for {missing()}. See what that worker does, and "
                        f"start again, or allow more time: {TIMEOUT}=…"
                    ) from error
            for rank in (rank for rank, key in zip(ranks, keys, strict=True) if not self.store.check([key])):
                sign, now = self._sign_of(rank), time.monotonic()
                if rank not in heard or heard[rank][0] != sign:
                    heard[rank] = sign, now
                elif now - heard[rank][1] > _GONE and sign:
                    raise RunError(
                        f"{what}: rank {rank}{self._where(rank)} has given no sign of life for {_GONE:g} s: it, or its "
                        f"machine, is gone."
                    )

    def _sign_of(self, rank: int) -> bytes:
        """What a worker said last of itself; nothing if it has not begun to."""
        return self._get(f"alive/{rank}") if self.store.check([f"alive/{rank}"]) else b""

    def show_life(self) -> None:
        """Say from now on, from a thread of its own, that this worker is there: a machine that is lost closes no connection."""
        store = self.store.clone()  # a client is locked while it waits

        def beat() -> None:
            with suppress(RuntimeError):  # the store is gone: so is the run
                for number in count():
                    store.set(f"alive/{self.rank}", str(number))
                    time.sleep(_BEAT)

        threading.Thread(target=beat, daemon=True, name="secateurs-signs-of-life").start()

    def _set(self, key: str, value: bytes) -> None:
        with self._lost(key):
            self.store.set(key, value)

    def _get(self, key: str) -> bytes:
        with self._lost(key):
            found: bytes = self.store.get(key)
        return found

    def _forget(self, key: str) -> None:
        with suppress(RuntimeError):
            self.store.delete_key(key)

    @contextmanager
    def _lost(self, what: str) -> Iterator[None]:
        """Turn a broken connection into an error that says who is gone."""
        from torch.distributed import DistStoreError

        try:
            yield
        except DistStoreError:
            raise
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            raise RunError(
                f"{what}: rank {self.rank} lost the connection to another worker, which may be gone ({text})."
            ) from error


ALONE = Workers()
"""One process."""

_active: list[Workers] = [ALONE]
_joined: list[Workers] = []
_ours: list[bool] = []  # whether the process group is ours to destroy
_gloo: list[Any] = []  # a group for bytes, where the user's own is of another backend


def active() -> Workers:
    """The workers that measurements are shared among now."""
    return _active[-1]


def drawn(store: Any, phase: str, tickets: Sequence[int], rank: int) -> Iterator[int]:
    """Draw tickets from the counter of a phase until none is left; each is drawn by one worker only."""
    while (place := store.add(f"{phase}/next", 1) - 1) < len(tickets):
        store.set(f"{phase}/at/{rank}", str(tickets[place]))
        yield tickets[place]


def join() -> Workers:
    """Join the other processes that torchrun started, once; `ALONE` if it started only this one, or none."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return ALONE
    if not _joined:
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        timeout = _timeout()
        try:
            # torch knows who has the store: torchrun itself, or rank 0
            store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
        except RuntimeError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT')}"
            text = str(error).partition("\n")[0]
            raise RunError(
                f"rank {os.environ['RANK']} could not join the other workers at {where} within {timeout:g} s ({text}). "
                f"Start all machines, with the same rendezvous."
            ) from error
        first = Workers(rank, size, PrefixStore("secateurs", store), timeout)
        found = Workers(rank, size, PrefixStore(f"secateurs/{first.meet()}", store), timeout)
        found.show_life()
        found.check_same("joining", {"number of workers": str(size)})
        _joined.append(found)
    return _joined[0]


def leave() -> None:
    """Close the process group, if it is ours: a process that ends with one open may hang or abort."""
    if _ours:
        import torch.distributed as dist

        _ours.clear()
        _gloo.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


def rank() -> int:
    """The rank that torchrun gave this process; 0 if it did not start it."""
    return int(os.environ.get("RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0


def local_size() -> int:
    """How many workers torchrun started on this machine; 1 if it did not start this process."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def restarts() -> int:
    """How often torchrun has restarted the workers of this machine."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _timeout() -> float:
    given = os.environ.get(TIMEOUT, "")
    try:
        found = float(given) if given else _SECONDS
    except ValueError:
        found = 0.0
    if found <= 0:
        raise RunError(f"{TIMEOUT}={given}: wanted a number of seconds above 0.")
    return found
