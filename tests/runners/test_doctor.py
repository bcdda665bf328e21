from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.config import Profile
from bench.plans import profile
from runners.doctor import Check, examine


def mock(**target: Any) -> Profile:
    pair = {"target": {"kind": "mock", **target}, "small": {"kind": "mock"}}
    return Profile.model_validate({"name": "m", "description": "d", "pair": pair})


async def checks(chosen: Profile, runs: Path, **how: Any) -> dict[str, Check]:
    return {check.name: check async for check in examine(chosen, runs, **how)}


async def test_all_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REUSEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("REUSEBENCH_DATA", raising=False)
    monkeypatch.setattr("runners.doctor._FREE_BYTES", 1)
    found = await checks(mock(), tmp_path / "runs")
    assert {
        "python",
        "disk: model store",
        "disk: runs",
        "ports",
        "model: encoder",
        "data: formula",
        "program isolation",
        "engine: target",
        "engine: small",
        "browser",
    } == set(found)
    for check in found.values():
        assert check.ok or not check.needed, check
        assert bool(check.cure) is not check.ok
        assert check.detail
    assert not (tmp_path / "runs").exists() and not (tmp_path / "cache").exists(), "looking makes nothing"


async def test_missing_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REUSEBENCH_CACHE", str(tmp_path))
    found = await checks(profile("laptop"), tmp_path)
    for name in ("model: target", "model: small", "engine: target", "engine: small"):
        assert not found[name].ok and found[name].needed
        assert found[name].cure == "reusebench models pull"
    assert "absent" in found["model: target"].detail
    assert not found["model: encoder"].ok and "absent" in found["model: encoder"].detail
    assert found["model: encoder"].cure == "reusebench models pull"


async def test_each_trouble_has_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REUSEBENCH_DATA", str(tmp_path / "absent"))
    monkeypatch.setattr("runners.doctor._FREE_BYTES", 10**18)
    elsewhere = {"kind": "openai", "url": "http://127.0.0.1:9/v1", "model": "m"}
    pair = {"target": elsewhere, "small": {"kind": "llamacpp", "model": "no-such-model"}}
    chosen = Profile.model_validate({"name": "m", "description": "d", "pair": pair})
    found = await checks(chosen, tmp_path)
    assert not found["data: REUSEBENCH_DATA"].ok and not found["data: REUSEBENCH_DATA"].needed
    assert found["disk: runs"].cure.startswith("Free ")
    assert "can't be reached" in found["engine: target"].detail
    assert "models pull" not in found["engine: target"].cure, "that would not help"
    assert not found["model: small"].ok and "models list" in found["model: small"].cure
    assert all(check.cure for check in found.values() if not check.ok)


async def test_engines_are_left_out(tmp_path: Path) -> None:
    found = await checks(mock(), tmp_path, engines=False)
    assert not [name for name in found if name.startswith("engine")]
