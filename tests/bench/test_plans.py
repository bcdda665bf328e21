from __future__ import annotations

import pytest

from bench.errors import UsageError
from bench.plans import experiment, experiment_names, experiment_run, profile, profile_names
from bench.registry import names
from runners.run import plan, resolve


@pytest.mark.parametrize("name", experiment_names())
@pytest.mark.parametrize("chosen", profile_names())
def test_every_experiment_resolves_at_every_profile(name: str, chosen: str) -> None:
    declared, at = experiment(name), profile(chosen)
    assert declared.id == name
    assert at.name == chosen
    config = resolve(experiment_run(declared, at, n=2))
    assert [(cell.workload, cell.method) for cell in config.cells] == [
        (workload, method) for workload in declared.workloads for method in declared.methods
    ]
    assert config.baseline in declared.methods
    assert {cell.selection.n for cell in config.cells} == {2}
    assert all(cell.method_config for cell in config.cells), "settings are filled in"
    assert at.pair.target.kind in names("engine")
    if all(cell.selection.source == "builtin" for cell in config.cells):
        assert [len(item.samples) for item in plan(config)] == [2] * len(config.cells)


def test_speculative_twins_take_the_first_samples() -> None:
    declared, laptop = experiment("minicache-finance"), profile("laptop")
    plans = plan(resolve(experiment_run(declared, laptop, n=6, twins=4)))
    by_method = {item.cell.method: item.samples for item in plans}
    assert by_method["pot+specdec"] == by_method["pot"][:4] and len(by_method["pot"]) == 6
    assert {cell.first for cell in experiment_run(declared, laptop).cells} == {None, 8}
    whole = experiment_run(
        declared.model_copy(update={"twins": None}), laptop.model_copy(update={"sizes": {}})
    )
    assert {cell.first for cell in whole.cells} == {None}


@pytest.mark.parametrize("chosen", profile_names())
def test_sizes_name_experiments(chosen: str) -> None:
    assert set(profile(chosen).sizes) <= set(experiment_names())


def test_the_profile_lies_over_the_experiment_and_n_over_both() -> None:
    declared = experiment("minicache-finance").model_copy(update={"selection": {"n": 3, "seed": 9}})
    laptop = profile("laptop")
    sized = experiment_run(declared, laptop)
    wanted = laptop.sizes["minicache-finance"]["n"]
    assert {(cell.selection.n, cell.selection.seed) for cell in sized.cells} == {(wanted, 9)}
    assert {cell.selection.n for cell in experiment_run(declared, laptop, n=7).cells} == {7}
    changed = experiment_run(declared, laptop, ["pair.target.kind=mock", "cells.1.repeats=2"])
    assert changed.pair.target.kind == "mock"
    assert [cell.repeats for cell in changed.cells[:3]] == [1, 2, 1]


def test_cells_of_one_selection_share_their_samples() -> None:
    plans = plan(resolve(experiment_run(experiment("minicache-finance"), profile("laptop"), n=2)))
    assert all(item.samples is plans[0].samples for item in plans if item.cell.first is None)


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match='no experiment "minicache-finanse".*mean "minicache-finance"'):
        experiment("minicache-finanse")
    with pytest.raises(UsageError, match='no profile "labtop".*mean "laptop"'):
        profile("labtop")
    with pytest.raises(UsageError, match="no profile"):
        profile("../profiles/laptop")
