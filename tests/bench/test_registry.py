from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import registry
from bench.errors import UsageError
from bench.workload import Workload


@pytest.mark.parametrize("name", registry.names("method"))
def test_methods_resolve(name: str) -> None:
    spec = registry.variant(name)
    cls = registry.method_class(spec.method)
    cls.Config(**spec.config)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", registry.names("workload"))
def test_workloads_resolve(name: str) -> None:
    one = registry.workload(name)
    assert isinstance(one, Workload)
    assert one.name == name


@pytest.mark.parametrize("name", registry.names("engine"))
def test_engines_resolve(name: str) -> None:
    assert callable(registry.engine_class(name))


def test_variants_are_of_methods() -> None:
    assert {method for method, _ in registry.VARIANTS.values()} <= set(registry.METHODS)
    assert not set(registry.VARIANTS) & set(registry.METHODS)


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match='no method "exactcach".*mean "exactcache"'):
        registry.variant("exactcach")
    with pytest.raises(UsageError, match='no workload "formular".*mean "formula"'):
        registry.workload("formular")
    with pytest.raises(UsageError, match='no engine "lamacpp".*mean "llamacpp"'):
        registry.engine_class("lamacpp")


def test_any_method_can_have_a_target_with_speculative_decoding() -> None:
    plain, drafted = registry.variant("minicache-antiunify"), registry.variant("minicache-antiunify+specdec")
    assert (drafted.method, drafted.config) == (plain.method, plain.config)
    assert (plain.specdec, drafted.specdec) == (False, True)
    assert not registry.variant("pot").specdec and registry.variant("pot+specdec").specdec
    with pytest.raises(UsageError, match=r'no method "potty\+specdec".*mean "pot\+specdec"'):
        registry.variant("potty+specdec")
    with pytest.raises(UsageError, match=r'no method "pot\+specdeck".*mean "pot\+specdec"'):
        registry.variant("pot+specdeck")
    with pytest.raises(UsageError, match="no method"):
        registry.variant("pot+specdec+specdec")


PLUGIN = '''
class Method:
    """A method from elsewhere."""


class Work:
    """A workload from elsewhere."""

    name = "elsewhere"
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that registers itself by entry points, one of them broken."""
    (tmp_path / "plugin_elsewhere.py").write_text(PLUGIN)
    facts = tmp_path / "plugin_elsewhere-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-elsewhere\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[reusebench.methods]\nelsewhere = plugin_elsewhere:Method\nbroken = plugin_absent:Method\n"
        "pot = plugin_elsewhere:Method\n"
        "[reusebench.workloads]\nelsewhere = plugin_elsewhere:Work\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("plugin_elsewhere", None)


@pytest.mark.usefixtures("plugin")
def test_plugins() -> None:
    assert "elsewhere" in registry.names("method")
    assert "elsewhere" in registry.names("workload")
    assert registry.variant("elsewhere") == registry.Variant("elsewhere", {})
    assert registry.method_class("elsewhere").__module__ == "plugin_elsewhere"
    assert registry.workload("elsewhere").name == "elsewhere"
    assert registry.method_class("pot").__module__ == "methods.pot", "ours can't be taken over"
    with pytest.raises(UsageError, match='"broken" can\'t be loaded from plugin_absent:Method'):
        registry.method_class("broken")
