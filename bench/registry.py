"""Names of methods, workloads and engines, imported only when asked for.

A new method or workload is one file and one line here; an outside package registers through the entry
point groups ``reusebench.methods`` and ``reusebench.workloads`` instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from bench.errors import UsageError, did_you_mean
from bench.workload import Workload

__all__ = [
    "ENGINES",
    "METHODS",
    "SPECDEC",
    "VARIANTS",
    "WORKLOADS",
    "Variant",
    "engine_class",
    "method_class",
    "names",
    "variant",
    "workload",
]

METHODS: Mapping[str, str] = {
    "direct": "methods.direct:Direct",
    "pot": "methods.pot:PoT",
    "exactcache": "methods.exactcache:ExactCache",
    "minicache": "methods.minicache:MiniCache",
    "gptcache": "methods.gptcache:GPTCache",
    "gencache": "methods.gencache:GenCache",
}

VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "direct-small": ("direct", {"engine": "small"}),
    "pot-small": ("pot", {"engine": "small"}),
    "gencache-feedback": ("gencache", {"feedback": True}),
    "minicache-all-spans": ("minicache", {"choices": "all"}),
    "minicache-antiunify": ("minicache", {"make": "antiunify"}),
    "minicache-oracle-groups": ("minicache", {"grouping": "template"}),
    "minicache-guarded": (
        "minicache",
        {"quarantine_after": 3, "shadow_share": 0.05, "guard_wording": True},
    ),
    "minicache-no-small-model": ("minicache", {"extraction": "pattern"}),
    "minicache-no-validation": ("minicache", {"validation": False}),
    "minicache-no-reflection": ("minicache", {"reflection": False}),
    "minicache-no-backoff": ("minicache", {"beta": 1.0}),
}
"""Methods with other settings, under names of their own: name → (method, settings)."""

WORKLOADS: Mapping[str, str] = {
    "formula": "data.formula:Formula",
}

ENGINES: Mapping[str, str] = {
    "llamacpp": "runners.engines.llamacpp:LlamaCppEngine",
    "openai": "runners.engines.openai:OpenAIEngine",
    "mock": "runners.engines.mock:MockEngine",
}

_KINDS: Mapping[str, Mapping[str, str]] = {"method": METHODS, "workload": WORKLOADS, "engine": ENGINES}


def names(kind: str) -> list[str]:
    """Return every registered name of a kind (``method``, ``workload``, ``engine``), variants included."""
    extra = VARIANTS if kind == "method" else {}
    return sorted({*_KINDS[kind], *extra, *_plugins(kind)})


SPECDEC = "+specdec"
"""Suffix of a method's name: the same method on a target with speculative decoding."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A registered method with settings laid over its defaults.

    Attributes:
        method: The method's name.
        config: The settings.
        specdec: Whether its target decodes speculatively.
    """

    method: str
    config: Mapping[str, Any]
    specdec: bool = False


def variant(name: str) -> Variant:
    """Return what a name stands for: a variant, or a method with its defaults, each ``+specdec`` or not.

    Raises:
        UsageError: No such method.
    """
    plain = name.removesuffix(SPECDEC)
    specdec = plain != name
    if plain in VARIANTS:
        return Variant(*VARIANTS[plain], specdec=specdec)
    known = names("method")
    if plain not in known:
        wanted, suffix = (name, SPECDEC) if "+" in name else (plain, "")
        raise UsageError(f'There is no method "{name}".{did_you_mean(wanted, [n + suffix for n in known])}')
    return Variant(plain, {}, specdec)


def _plugins(kind: str) -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=f"reusebench.{kind}s")}


def _load(kind: str, name: str) -> Any:
    target = _KINDS[kind].get(name) or _plugins(kind).get(name)
    if target is None:
        raise UsageError(f'There is no {kind} "{name}".{did_you_mean(name, names(kind))}')
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f'The {kind} "{name}" can\'t be loaded from {target}: {error}.') from error


def method_class(name: str) -> Callable[..., Any]:
    """Return the class of a method; it has a ``Config`` and is built as ``cls(config, environment)``.

    Raises:
        UsageError: No such method.
    """
    found: Callable[..., Any] = _load("method", name)
    return found


def workload(name: str) -> Workload:
    """Return a workload.

    Raises:
        UsageError: No such workload.
    """
    found: Workload = _load("workload", name)()
    return found


def engine_class(kind: str) -> Callable[..., Any]:
    """Return the class of an engine kind; it is built as ``cls(config, role)``.

    Raises:
        UsageError: No such engine.
    """
    found: Callable[..., Any] = _load("engine", kind)
    return found
