from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.config import (
    EngineConfig,
    PairConfig,
    Profile,
    RunConfig,
    apply_overrides,
    config_hash,
    read_toml,
    validate,
)
from bench.errors import UsageError


def data(**changes: Any) -> dict[str, Any]:
    return {
        "profile": "p",
        "pair": {"target": {"kind": "mock", "params": {"a": 1, "b": 2}}},
        "cells": [{"method": "direct", "workload": "formula"}],
        **changes,
    }


def fault(changed: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        validate(RunConfig, changed, "here")
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pare": {}}, 'pare: unknown key Did you mean "pair"?'),
        ({"pair": {"target": {"thread": 1}}}, 'pair.target.thread: unknown key Did you mean "threads"?'),
        (
            {"cells": [{"method": "m", "workload": "w", "selection": {"sede": 1}}]},
            'cells.0.selection.sede: unknown key Did you mean "seed"?',
        ),
        ({"cells": []}, "cells: "),
        ({"cells": [{"method": "m", "workload": "w", "repeats": 0}]}, "cells.0.repeats: "),
        ({"cells": [{"method": "m", "workload": "w", "concurrency": 2}]}, "cells.0.concurrency: "),
        ({"cells": [{"method": "m", "workload": "w"}] * 2}, "two cells are called 'w+m'"),
        ({"cells": [{"method": "m", "workload": "w", "label": "../up"}]}, "cells.0.label: "),
        ({"experiment": "a/b"}, "experiment: "),
        ({"baseline": "dirct"}, "the baseline 'dirct' is not among the methods. Did you mean \"direct\"?"),
        ({"pair": {"target": {"timeout_s": float("inf")}}}, "pair.target.timeout_s: "),
        (
            {"cells": [{"method": "m", "workload": "w", "selection": {"source": "path"}}]},
            "`path` goes with source",
        ),
    ],
)
def test_faults_are_named(changes: dict[str, Any], said: str) -> None:
    text = fault(data(**changes))
    assert said in text
    assert text.startswith("here: ")
    assert "Value error" not in text


def test_a_path_implies_its_source() -> None:
    cell = {"method": "m", "workload": "w", "selection": {"path": "x.jsonl"}}
    assert validate(RunConfig, data(cells=[cell]), "here").cells[0].selection.source == "path"


def test_overrides() -> None:
    settings = [
        "pair.target.threads=4",
        "pair.target.model=some-model",
        'pair.small={kind = "mock"}',
        "cells.0.selection.n=5",
        "cells.0.stream=false",
        "pair.target.params.stop=[1, 2]",
        "pair.target.url=http://host/v1?a=b",
    ]
    before = data()
    result = apply_overrides(before, settings)
    assert before == data()
    assert result["pair"]["small"] == {"kind": "mock"}
    assert result["cells"][0] == {
        "method": "direct",
        "workload": "formula",
        "selection": {"n": 5},
        "stream": False,
    }
    assert result["pair"]["target"] == {
        "kind": "mock",
        "threads": 4,
        "model": "some-model",
        "url": "http://host/v1?a=b",
        "params": {"a": 1, "b": 2, "stop": [1, 2]},
    }


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("pair.target.threads", "--set takes KEY=VALUE"),
        ("=3", "--set takes KEY=VALUE"),
        ("cells.1.repeats=2", "no index of a list of 1"),
        ("cells.x=2", "no index of a list of 1"),
        ("profile.x=2", "plain value"),
        ("profile.x.y=2", "plain value"),
        ("pair.target.timeout_s=nan", "no finite number"),
        ("pair.target.params.x=[1.0, inf]", "no finite number"),
    ],
)
def test_bad_overrides(setting: str, said: str) -> None:
    with pytest.raises(UsageError, match="--set") as caught:
        apply_overrides(data(), [setting])
    assert said in str(caught.value)


def test_hash() -> None:
    one = RunConfig.model_validate(data())
    turned = json.loads(json.dumps(data()))
    turned["pair"]["target"]["params"] = {"b": 2, "a": 1}
    turned = dict(reversed(turned.items()))
    assert config_hash(RunConfig.model_validate(turned)) == config_hash(one)
    spelled_out = data(baseline=None, experiment="adhoc")
    assert config_hash(RunConfig.model_validate(spelled_out)) == config_hash(one)
    for change in (
        {"baseline": "direct"},
        {"pair": {"target": {"kind": "mock"}}},
        {"cells": [{"method": "direct", "workload": "formula", "selection": {"seed": 1}}]},
    ):
        assert config_hash(RunConfig.model_validate(data(**change))) != config_hash(one)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a = ", "not valid TOML"),
        (b"a = \xff", "not valid TOML"),
        (b"a = 1\na = 2", "not valid TOML"),
        (b"a = nan", "no finite number"),
    ],
)
def test_bad_toml(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="x.toml") as caught:
        read_toml(path)
    assert said in str(caught.value)
    with pytest.raises(UsageError, match="Can't read"):
        read_toml(tmp_path / "absent.toml")
    with pytest.raises(UsageError, match="Can't read"):
        read_toml(tmp_path)


LLAMA = {"kind": "llamacpp", "model": "big"}
SMALL = {"kind": "llamacpp", "model": "little"}
OPENAI = {"kind": "openai", "url": "http://host/v1", "model": "big"}


@pytest.mark.parametrize(
    ("pair", "drafter"),
    [
        ({"target": LLAMA, "small": SMALL}, "little"),
        ({"target": LLAMA}, None),
        ({"target": LLAMA, "small": OPENAI}, None),
        ({"target": LLAMA, "specdec": {**LLAMA, "drafter": "tiny"}}, "tiny"),
        ({"target": LLAMA, "small": SMALL, "specdec": {**LLAMA, "draft_max": 7}}, "little"),
        ({"target": OPENAI, "small": SMALL}, None),
    ],
)
def test_what_drafts_for_the_target(pair: dict[str, Any], drafter: str | None) -> None:
    twin = PairConfig.model_validate(pair).speculative()
    assert (None if twin is None else twin.drafter) == drafter
    if twin is not None:
        assert twin.model == "big" and twin.draft_max == pair.get("specdec", {}).get("draft_max", 3)


def test_a_server_elsewhere_brings_its_own_drafter() -> None:
    pair = {"target": OPENAI, "specdec": {**OPENAI, "url": "http://drafted/v1"}}
    twin = PairConfig.model_validate(pair).speculative()
    assert twin is not None and (twin.url, twin.drafter) == ("http://drafted/v1", None)


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ({"target": {**LLAMA, "drafter": "little"}}, "set specdec.drafter"),
        ({"target": LLAMA, "small": {**SMALL, "drafter": "little"}}, "set specdec.drafter"),
        ({"target": LLAMA, "specdec": {**LLAMA, "model": "other", "drafter": "x"}}, "must be the target's"),
        ({"target": OPENAI, "specdec": {**OPENAI, "drafter": "x"}}, "brings its own"),
    ],
)
def test_no_row_is_drafted_for_without_saying_so(pair: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        validate(PairConfig, pair, "pair")


def test_configurations_cannot_change() -> None:
    engine = EngineConfig()
    with pytest.raises(ValueError, match="frozen"):
        engine.kind = "mock"
    with pytest.raises(UsageError, match="description"):
        validate(Profile, {"name": "x", "pair": {"target": {}}}, "x")
