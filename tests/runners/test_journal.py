from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bench.errors import ReuseBenchError
from runners.journal import Journal, prune, write_atomically


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "state.jsonl"


def filled(path: Path, count: int = 3) -> Journal:
    journal = Journal(path)
    for number in range(count):
        journal.append(f"r{number}", {"n": number, "text": "caf\u00e9 \ud83d\nx"})
    return journal


def numbers(path: Path) -> list[int]:
    return [event["n"] for event in Journal(path).read()]


def test_events_come_back_in_order_at_once(path: Path) -> None:
    assert list(Journal(path).read()) == []
    journal = filled(path)
    assert list(Journal(path).read()) == [{"n": n, "text": "caf\u00e9 \ud83d\nx"} for n in range(3)]
    journal.close()
    journal.append(None, {"n": 3})
    journal.close()
    journal.close()
    assert numbers(path) == [0, 1, 2, 3]


def test_in_memory_there_is_no_file() -> None:
    journal = Journal(None)
    journal.append("r", {"n": 1})
    journal.replace([{"n": 2}])
    journal.close()
    assert list(journal.read()) == []


def test_an_event_outlives_a_kill_of_its_process(path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from runners.journal import Journal\n"
        "Journal(Path(sys.argv[1])).append('r', {'n': 7}); os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code, str(path)], cwd=root, check=False).returncode == -9
    assert numbers(path) == [7]


@pytest.mark.parametrize(
    "torn", [b'{"request": "r9", "ev', b'{"request": "r9", "event": {"n": 9}}', b"\xff\x00"]
)
def test_a_torn_last_line_is_no_event_and_does_not_spoil_the_next(path: Path, torn: bytes) -> None:
    filled(path).close()
    with path.open("ab") as file:
        file.write(torn)
    assert numbers(path) == [0, 1, 2]
    journal = Journal(path)
    journal.append("r3", {"n": 3})
    journal.close()
    assert numbers(path) == [0, 1, 2, 3]


@pytest.mark.parametrize("line", ["{", "\x00\x00", "[1]", '{"event": {}}', '{"request": null}'])
def test_damage_before_the_end_is_reported_with_its_place(path: Path, line: str) -> None:
    filled(path).close()
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, lines[2]]) + "\n")
    with pytest.raises(ReuseBenchError, match=r"state\.jsonl, line 2: damaged.*Delete the file"):
        list(Journal(path).read())
    assert lines[2] in path.read_text()


def test_replacing_makes_the_events_the_whole(path: Path) -> None:
    journal = filled(path)
    journal.replace([{"n": 9}])
    journal.append("r", {"n": 10})
    assert numbers(path) == [9, 10]
    journal.replace(event for event in [{"n": n} for n in numbers(path)])
    assert numbers(path) == [9, 10]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    journal.close()


def test_pruning_keeps_the_events_of_finished_requests(path: Path) -> None:
    prune(path, lambda _: True)
    assert not path.exists()
    journal = filled(path, 4)
    journal.append("r1", {"n": 11})
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"torn')
    prune(path, lambda request: request in ("r1", "r3"))
    assert numbers(path) == [1, 3, 11]
    assert path.read_bytes().endswith(b"}\n")
    assert [json.loads(line)["request"] for line in path.read_text().splitlines()] == ["r1", "r3", "r1"]


def test_only_the_owner_reads_what_users_asked(path: Path) -> None:
    journal = filled(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    journal.replace([{"n": 1}])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failed_write_leaves_the_old_content(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(path, "old")

    def broken(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
