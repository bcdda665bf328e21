"""From names to a run: experiments and profiles as they ship, and the configuration that they resolve to."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from bench.config import Experiment, Profile, RunConfig, apply_overrides, read_toml, validate
from bench.errors import UsageError, did_you_mean
from bench.registry import SPECDEC

__all__ = ["experiment", "experiment_names", "experiment_run", "profile", "profile_names"]


def experiment_names() -> list[str]:
    """Return the id of every experiment, sorted."""
    return _names("experiments")


def profile_names() -> list[str]:
    """Return the name of every profile, sorted."""
    return _names("profiles")


def experiment(name: str) -> Experiment:
    """Return an experiment's declaration.

    Raises:
        UsageError: No such experiment.
    """
    return validate(Experiment, _read("experiments", "experiment", name), f"experiment {name}")


def profile(name: str) -> Profile:
    """Return a profile.

    Raises:
        UsageError: No such profile.
    """
    return validate(Profile, _read("profiles", "profile", name), f"profile {name}")


def experiment_run(
    declared: Experiment,
    chosen: Profile,
    settings: Sequence[str] = (),
    n: int | None = None,
    groups: int | None = None,
    twins: int | None = None,
) -> RunConfig:
    """Return the run that ``declared`` means at ``chosen``, with ``--set`` settings applied.

    Args:
        declared: The experiment.
        chosen: The profile; its size for this experiment is laid over the experiment's own.
        settings: ``KEY=VALUE`` with dotted keys into the run's configuration.
        n: Samples per cell, over the profile's.
        groups: Groups that they are drawn from, over the profile's.
        twins: Samples, from the first on, of each cell with speculative decoding, over the profile's.

    Raises:
        UsageError: A setting is wrong.
    """
    selection = {**declared.selection, **chosen.sizes.get(declared.id, {})}
    for key, value in (("n", n), ("groups", groups)):
        if value is not None:
            selection[key] = value
    sized = selection.pop("twins", declared.twins)
    first = sized if twins is None else twins
    cells = [
        {
            "method": method,
            "workload": one,
            "selection": selection,
            "first": first if method.endswith(SPECDEC) else None,
        }
        for one in declared.workloads
        for method in declared.methods
    ]
    data: dict[str, Any] = {
        "experiment": declared.id,
        "profile": chosen.name,
        "pair": chosen.pair.model_dump(mode="json"),
        "cells": cells,
        "baseline": declared.baseline,
    }
    return validate(RunConfig, apply_overrides(data, settings), f"experiment {declared.id}")


def _names(folder: str) -> list[str]:
    entries = (entry.name for entry in (files("bench") / folder).iterdir())
    return sorted(name.removesuffix(".toml") for name in entries if name.endswith(".toml"))


def _read(folder: str, kind: str, name: str) -> dict[str, Any]:
    known = _names(folder)
    if name not in known:
        raise UsageError(f'There is no {kind} "{name}".{did_you_mean(name, known)}')
    with_path = files("bench") / folder / f"{name}.toml"
    return read_toml(with_path)
