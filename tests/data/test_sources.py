"""Pinned downloads and named files."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from bench.errors import DataMissing, UsageError
from bench.workload import Selection
from data.duplicates import normal_form, repeats, shared
from data.selection import Stream, choose
from data.sources import cache_folder, fetch, local_file, source


@pytest.fixture
def pin(tmp_path, monkeypatch):
    """A pin of a small file of ours, served from disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    upstream = tmp_path / "upstream.jsonl"
    upstream.write_bytes(b'{"a": 1}\n')
    content = upstream.read_bytes()
    return replace(
        source("formula", "test"),
        url=upstream.as_uri(),
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
    )


def test_pins_name_commit_and_hash():
    test, train = source("formula", "test"), source("formula", "train")
    assert test.sha256 == "48ed981796ec2f8ce9d5dbf36208a814ac32c3cf45b541fb9a82ea2d9655754d"
    assert train.sha256 == "8a8dd3294ff6b12cb32db640ba574c6d6efed65f1f8ca016051a788089c502f7"
    assert all(pin.revision in pin.url for pin in (test, train))
    with pytest.raises(UsageError, match='no split "tset".*Did you mean "test"'):
        source("formula", "tset")
    with pytest.raises(UsageError, match='no pinned data set "formulae"'):
        source("formulae", "test")


def test_fetch_downloads_once_and_works_offline_afterwards(pin, tmp_path):
    path = fetch(pin)
    assert path == cache_folder() / pin.sha256 / "formula_test.jsonl"
    assert path.read_bytes() == b'{"a": 1}\n'
    (tmp_path / "upstream.jsonl").unlink()
    assert fetch(pin) == path
    assert [entry.name for entry in path.parent.iterdir()] == ["formula_test.jsonl"]


def test_fetch_refuses_another_hash_and_keeps_nothing(pin, tmp_path):
    (tmp_path / "upstream.jsonl").write_bytes(b'{"a": 2}\n')
    with pytest.raises(
        DataMissing, match=rf"found 9 bytes with sha256 .*wanted 9 bytes with sha256 {pin.sha256}"
    ):
        fetch(pin)
    assert not cache_folder().exists()


def test_fetch_refuses_a_spoilt_cache(pin):
    fetch(pin).write_bytes(b"spoilt")
    with pytest.raises(DataMissing, match=r"found 6 bytes .* To mend it: delete .*--path FILE"):
        fetch(pin)


def test_fetch_without_a_network_says_what_to_do(pin, tmp_path):
    (tmp_path / "upstream.jsonl").unlink()
    with pytest.raises(DataMissing, match=r"FinLoRA Financial Math \(test\).*wanted file:.*pass --path FILE"):
        fetch(pin)


def test_local_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real" / "formula").mkdir(parents=True)
    wanted = tmp_path / "real" / "formula" / "formula_test.jsonl"
    wanted.write_text("{}")
    names = {"title": "Formula", "file_name": "formula_test.jsonl"}
    assert local_file(str(wanted), **names) == wanted
    assert local_file(str(wanted.parent), **names) == wanted
    monkeypatch.delenv("REUSEBENCH_DATA", raising=False)
    with pytest.raises(DataMissing, match="Formula: found nothing at formula/formula_test.jsonl; wanted"):
        local_file("formula/formula_test.jsonl", **names)
    monkeypatch.setenv("REUSEBENCH_DATA", str(tmp_path / "real"))
    assert local_file("formula/formula_test.jsonl", **names) == wanted
    with pytest.raises(DataMissing, match="a folder without formula_test.jsonl"):
        local_file(str(tmp_path / "real"), **names)


def test_duplicates_within_and_across_splits():
    train = ["Q: 2+2?", "Q: 3+3?"]
    test = ["q: 2+2 ?", "Q: 5+5?", "Q: 5+5?"]
    assert shared(test, train) == [0]
    assert repeats(test) == [2]
    assert normal_form("It costs  $1,200.50!") == normal_form("it costs $1,200.50")
    assert normal_form("2+2") != normal_form("2-2")
    assert normal_form("1.5") != normal_form("15")


def test_stream_is_the_same_everywhere():
    stream = Stream("a", 1)
    assert [stream.below(1000) for _ in range(4)] == [498, 65, 485, 773]
    assert sorted(Stream(3).shuffled(range(9))) == list(range(9))
    assert Stream(-1).unit() != Stream(1).unit()


def test_choose_spreads_over_groups_and_is_seeded():
    groups = {
        name: [f"{name}{number}" for number in range(size)] for name, size in (("a", 9), ("b", 9), ("c", 2))
    }
    drawn = choose(groups, Selection(n=8, seed=3), "T")
    assert sorted(item[0] for item in drawn) == sorted("aaabbbcc")
    assert drawn == choose(groups, Selection(n=8, seed=3), "T")
    assert drawn != choose(groups, Selection(n=8, seed=4), "T")
    assert {item[0] for item in choose(groups, Selection(groups=1, seed=1), "T")} < set("abc")
    with pytest.raises(UsageError, match="T has 20 samples in 3 groups; 21 were asked for"):
        choose(groups, Selection(n=21), "T")
    with pytest.raises(UsageError, match="T has 3 groups; 4 were asked for"):
        choose(groups, Selection(groups=4), "T")
