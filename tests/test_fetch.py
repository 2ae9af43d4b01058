"""Downloads against a real server on this machine: ranges, interruptions, wrong digests, absent files."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from secateurs._util.download import fetch, home
from secateurs.errors import DownloadError, InvalidInput

BODY = bytes(range(256)) * 4096  # 1 MiB
SHA256 = hashlib.sha256(BODY).hexdigest()
MD5 = hashlib.md5(BODY).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves BODY at every address but /absent, and writes down which ranges were asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []
        self.knows_ranges = True
        self.announces_length = True
        self.shifts_ranges_by = 0
        self.breaks_after: list[int] = []  # bytes to send before hanging up, one for each of the next answers

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        if self.path == "/absent":
            self.send_error(404, "Not Found")
            return
        start = 0
        if asked and self.server.knows_ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(BODY):
                self.send_error(416, "Range Not Satisfiable")
                return
            start -= self.server.shifts_ranges_by
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(BODY) - 1}/{len(BODY)}")
        else:
            self.send_response(200)
        if self.server.announces_length:
            self.send_header("Content-Length", str(len(BODY) - start))
        self.end_headers()
        limit = self.server.breaks_after.pop(0) if self.server.breaks_after else len(BODY)
        self.wfile.write(BODY[start : start + limit])

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


@pytest.mark.parametrize("digests", [{}, {"sha256": SHA256}, {"md5": MD5}, {"sha256": SHA256[:8], "md5": MD5.upper()}])
def test_downloads_the_file_whole(server: Server, tmp_path: Path, digests: dict[str, str]) -> None:
    path = tmp_path / "new" / "folder" / "file.bin"
    assert fetch(server.url, path, **digests) == path
    assert path.read_bytes() == BODY
    assert [item.name for item in path.parent.iterdir()] == ["file.bin"]


def test_a_file_with_the_right_checksum_is_not_downloaded_again(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(BODY)
    assert fetch(server.url, path, sha256=SHA256, md5=MD5) == path
    assert server.asked == []


def test_a_file_with_a_wrong_checksum_is_replaced(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(BODY[:-1])
    fetch(server.url, path, sha256=SHA256)
    assert path.read_bytes() == BODY


def test_a_part_left_behind_is_completed_and_not_fetched_twice(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    part_of(path).write_bytes(BODY[:300_000])
    fetch(server.url, path, sha256=SHA256)
    assert server.asked == ["bytes=300000-"]
    assert path.read_bytes() == BODY
    assert not part_of(path).exists()


def test_a_whole_part_needs_no_request(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    part_of(path).write_bytes(BODY)
    fetch(server.url, path, sha256=SHA256)
    assert server.asked == []
    assert path.read_bytes() == BODY


def test_a_broken_connection_is_resumed(server: Server, tmp_path: Path) -> None:
    server.breaks_after = [400_000, 100_000]
    path = tmp_path / "file.bin"
    fetch(server.url, path, sha256=SHA256)
    assert server.asked == [None, "bytes=400000-", "bytes=500000-"]
    assert path.read_bytes() == BODY


def test_what_arrived_is_kept_for_the_next_call(server: Server, tmp_path: Path) -> None:
    server.breaks_after = [100_000] * 3
    path = tmp_path / "file.bin"
    with pytest.raises(DownloadError, match=f"closed after 300000 of {len(BODY)} bytes.*put it at {path}"):
        fetch(server.url, path, sha256=SHA256)
    assert part_of(path).read_bytes() == BODY[:300_000]
    assert not path.exists()
    fetch(server.url, path, sha256=SHA256)
    assert server.asked[-1] == "bytes=300000-"
    assert path.read_bytes() == BODY


def test_without_a_checksum_a_part_is_not_trusted(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    part_of(path).write_bytes(b"of another version")
    server.breaks_after = [400_000]
    fetch(server.url, path)
    assert server.asked == [None, None]
    assert path.read_bytes() == BODY


def test_a_server_that_ignores_ranges_sends_all_anew(server: Server, tmp_path: Path) -> None:
    server.knows_ranges = False
    path = tmp_path / "file.bin"
    part_of(path).write_bytes(BODY[:300_000])
    fetch(server.url, path, sha256=SHA256)
    assert server.asked == ["bytes=300000-"]
    assert path.read_bytes() == BODY


def test_a_server_that_sends_another_range_is_asked_for_all(server: Server, tmp_path: Path) -> None:
    server.shifts_ranges_by = 7
    path = tmp_path / "file.bin"
    part_of(path).write_bytes(BODY[:300_000])
    fetch(server.url, path, sha256=SHA256)
    assert server.asked == ["bytes=300000-", None]
    assert path.read_bytes() == BODY


def test_a_part_longer_than_the_file_is_thrown_away(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    part_of(path).write_bytes(BODY + b"more")
    fetch(server.url, path, sha256=SHA256)
    assert server.asked == [f"bytes={len(BODY) + 4}-", None]
    assert path.read_bytes() == BODY


def test_a_server_that_tells_no_length_is_understood(server: Server, tmp_path: Path) -> None:
    server.announces_length = False
    calls: list[tuple[int, int | None]] = []
    fetch(server.url, tmp_path / "file.bin", sha256=SHA256, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (len(BODY), None)


@pytest.mark.parametrize(("name", "got", "wanted"), [("sha256", SHA256, "0" * 64), ("md5", MD5, "f" * 32)])
def test_a_wrong_checksum_deletes_what_arrived(server: Server, tmp_path: Path, name: str, got: str, wanted: str) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"what was there before")
    with pytest.raises(DownloadError, match=f"{server.url} arrived with {name} {got}, wanted {wanted}"):
        fetch(server.url, path, **{name: wanted})
    assert path.read_bytes() == b"what was there before"
    assert not part_of(path).exists()


def test_an_absent_file_names_the_answer_and_the_way_out(server: Server, tmp_path: Path) -> None:
    url, path = server.url.replace("file.bin", "absent"), tmp_path / "file.bin"
    with pytest.raises(DownloadError, match=f"{url} answered 404 Not Found. Download {url} by hand and put it at {path}"):
        fetch(url, path, sha256=SHA256)
    assert list(tmp_path.iterdir()) == []


def test_an_unreachable_server_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as free:  # bound but not listening: connections are refused
        free.bind(("127.0.0.1", 0))
        url, path = f"http://127.0.0.1:{free.getsockname()[1]}/file.bin", tmp_path / "file.bin"
        with pytest.raises(DownloadError, match=f"cannot reach {url}: .*refused.*put it at {path}"):
            fetch(url, path)


def test_a_place_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(DownloadError, match=f"cannot store {server.url} as {tmp_path / 'taken' / 'file.bin'}"):
        fetch(server.url, tmp_path / "taken" / "file.bin")


def test_progress_tells_bytes_on_disk_and_in_total(server: Server, tmp_path: Path) -> None:
    path, calls = tmp_path / "file.bin", []
    part_of(path).write_bytes(BODY[:300_000])
    fetch(server.url, path, sha256=SHA256, progress=lambda done, total: calls.append((done, total)))
    done = [before for before, _ in calls]
    assert done[0] > 300_000
    assert done == sorted(done)
    assert calls[-1] == (len(BODY), len(BODY))


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="'file:///etc/hostname': wanted an address that starts with http"):
        fetch("file:///etc/hostname", tmp_path / "file.bin")
    with pytest.raises(InvalidInput, match="sha256='12fca8' is not a checksum: wanted 8 to 64 hexadecimal digits"):
        fetch("http://127.0.0.1/", tmp_path / "file.bin", sha256="12fca8")
    with pytest.raises(InvalidInput, match="wanted 8 to 32 hexadecimal digits"):
        fetch("http://127.0.0.1/", tmp_path / "file.bin", md5=SHA256)


def test_home_is_the_users_cache_unless_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SECATEURS_HOME", raising=False)
    assert home() == tmp_path / ".cache" / "secateurs"
    monkeypatch.setenv("SECATEURS_HOME", str(tmp_path / "elsewhere"))
    assert home() == tmp_path / "elsewhere"
    monkeypatch.setenv("SECATEURS_HOME", "~/here")
    assert home() == tmp_path / "here"
    monkeypatch.setenv("SECATEURS_HOME", "")
    assert home() == tmp_path / ".cache" / "secateurs"
