"""Downloads against a real server on this machine: interruptions, wrong checksums, absent files."""

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
    """Serves BODY at every address but /absent, and counts the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = 0
        self.announces_length = True
        self.breaks_after = len(BODY)  # bytes to send before hanging up

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests += 1
        if self.path == "/absent":
            self.send_error(404, "Not Found")
            return
        self.send_response(200)
        if self.server.announces_length:
            self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[: self.server.breaks_after])

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
    assert server.requests == 0


def test_a_file_with_a_wrong_checksum_is_replaced(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(BODY[:-1])
    fetch(server.url, path, sha256=SHA256)
    assert path.read_bytes() == BODY


def test_an_interrupted_download_leaves_nothing_half_written(server: Server, tmp_path: Path) -> None:
    server.breaks_after = 400_000
    path = tmp_path / "file.bin"
    with pytest.raises(DownloadError, match=f"closed after 400000 of {len(BODY)} bytes.*put it at {path}"):
        fetch(server.url, path)
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"what was there before")
    with pytest.raises(DownloadError, match="closed after"):
        fetch(server.url, path, sha256=SHA256)
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("file.bin", b"what was there before")]


@pytest.mark.parametrize(("name", "got", "wanted"), [("sha256", SHA256, "0" * 64), ("md5", MD5, "f" * 32)])
def test_a_file_with_a_wrong_checksum_is_discarded(server: Server, tmp_path: Path, name: str, got: str, wanted: str) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"what was there before")
    with pytest.raises(DownloadError, match=f"{server.url} arrived with {name} {got}, wanted {wanted}, and was discarded"):
        fetch(server.url, path, **{name: wanted})
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("file.bin", b"what was there before")]


def test_a_missing_file_error_names_the_status_and_what_to_do(server: Server, tmp_path: Path) -> None:
    url, path = server.url.replace("file.bin", "absent"), tmp_path / "file.bin"
    with pytest.raises(DownloadError, match=f"{url} answered 404 Not Found. Download it by hand and put it at {path}"):
        fetch(url, path, sha256=SHA256)
    assert list(tmp_path.iterdir()) == []


def test_an_unreachable_server_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as free:  # bound but not listening: connections are refused
        free.bind(("127.0.0.1", 0))
        url, path = f"http://127.0.0.1:{free.getsockname()[1]}/file.bin", tmp_path / "file.bin"
        with pytest.raises(DownloadError, match=f"cannot download {url}: .*refused.*put it at {path}"):
            fetch(url, path)


def test_a_place_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(DownloadError, match=f"cannot download {server.url}: .*{tmp_path / 'taken'}"):
        fetch(server.url, tmp_path / "taken" / "file.bin")


@pytest.mark.parametrize("announced", [True, False])
def test_progress_gives_bytes_received_and_in_total(server: Server, tmp_path: Path, announced: bool) -> None:
    server.announces_length = announced
    calls: list[tuple[int, int | None]] = []
    fetch(server.url, tmp_path / "file.bin", sha256=SHA256, progress=lambda done, total: calls.append((done, total)))
    done = [received for received, _ in calls]
    assert done == sorted(done)
    assert done[0] > 0
    assert calls[-1] == (len(BODY), len(BODY) if announced else None)


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
