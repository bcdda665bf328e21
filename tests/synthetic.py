"""Synthetic runs for the tests of metrics and reports."""

from __future__ import annotations

import random
from typing import Any

from bench.metrics import NS
from bench.records import (
    BackgroundRecord,
    CacheRecord,
    CallRecord,
    ErrorInfo,
    GradeRecord,
    Record,
    StageRecord,
    Times,
)

SECOND = NS


def record(cell: str = "c", index: int = 0, **changes: Any) -> Record:
    """One right answer after one second, with one target call; every field can be replaced."""
    start = changes.pop("start", 0.0)
    latency = changes.pop("latency", 1.0)
    score = changes.pop("score", 1.0)
    begin, end = round(start * NS), round((start + latency) * NS)
    fields: dict[str, Any] = {
        "run": "r",
        "cell": cell,
        "index": index,
        "sample": f"s{index}",
        "times": Times(
            scheduled=begin,
            started=begin,
            received=begin,
            first_content=begin + (end - begin) // 2,
            finished=end,
        ),
        "calls": (call(begin, end),),
        "cache": CacheRecord(kind="none"),
        "outcome": "ok",
        "reply": "Answer: 42",
        "finish_reason": "stop",
        "usage": {"completion_tokens": 100},
    }
    if changes.get("outcome", "ok") in ("ok", "truncated", "unparsed"):
        fields["grade"] = grade(score)
    else:
        fields |= {"cache": None, "calls": (), "reply": None, "usage": None}
        fields["error"] = ErrorInfo(type="connection", message="connection refused")
    return Record(**{**fields, **changes})


def grade(score: float, rounded: float | None = None) -> GradeRecord:
    scores = {"strict": score, "rounded": score if rounded is None else rounded}
    return GradeRecord(
        scores=scores, extracted="42", parsed=True, explanation="42 against 42", workload_version="1"
    )


def call(begin: int, end: int, **changes: Any) -> CallRecord:
    fields: dict[str, Any] = {
        "engine": "target",
        "purpose": "answer",
        "model": "m",
        "started": begin,
        "finished": end,
        "first_content": begin + (end - begin) // 2,
        "tokens_in": 200,
        "tokens_cached": 50,
        "tokens_out": 100,
        "finish_reason": "stop",
        "tries": 1,
    }
    return CallRecord(**{**fields, **changes})


def beside(cell: str = "c", start: float = 0.0, length: float = 1.0, **changes: Any) -> BackgroundRecord:
    """One piece of work beside the requests: an entry, accepted at once, with one target call."""
    begin, end = round(start * NS), round((start + length) * NS)
    fields: dict[str, Any] = {
        "run": "r",
        "cell": cell,
        "name": "generate",
        "request": f"r/{cell}/0/0/1",
        "started": begin,
        "finished": end,
        "calls": (call(begin, end, purpose="generate"),),
        "outcome": "ok",
        "details": {"attempted": 1, "accepted": 1},
    }
    return BackgroundRecord(**{**fields, **changes})


PROFILES: dict[str, tuple[float, float, float, str | None]] = {
    # accuracy, seconds on a miss, share of hits, kind of a hit
    "direct": (0.52, 1.9, 0.0, None),
    "pot": (0.78, 3.1, 0.0, None),
    "exactcache": (0.78, 3.1, 0.12, "exact"),
    "gptcache": (0.55, 3.1, 0.6, "semantic"),
    "gencache": (0.76, 3.2, 0.05, "program"),
    "minicache": (0.74, 3.2, 0.7, "program"),
}


def run_of(
    methods: tuple[str, ...] = ("direct", "pot", "exactcache"),
    workloads: tuple[str, ...] = ("formula",),
    n: int = 50,
    *,
    seed: int = 0,
    **changes: Any,
) -> tuple[dict[str, Any], list[Record]]:
    """A whole run that looks like a real one."""
    rng = random.Random(seed)
    cells = [
        {"id": f"{w}+{m}", "method": m, "workload": w, "label": None, "repeats": 1}
        for w in workloads
        for m in methods
    ]
    records: list[Record] = []
    clock = 0.0
    for cell in cells:
        method = str(cell["method"])
        accuracy, seconds, hits, kind = PROFILES[method.split("+")[0]]
        if method.endswith("+specdec"):
            seconds *= 0.75
        skill = random.Random(7)
        for index in range(n):
            hard = skill.random()
            hit = rng.random() < hits
            right = float(hard + rng.gauss(0, 0.08) < accuracy)
            latency = (0.9 if kind == "program" else 0.004) * rng.lognormvariate(0, 0.25) if hit else 0.0
            latency = latency or seconds * rng.lognormvariate(0, 0.3)
            records.append(_one(cell, index, clock, latency, right, hit, kind))
            clock += latency + 0.01
    run = {
        "schema_version": 1,
        "id": "20261130-120000-minicache-finance-ab12",
        "status": "complete",
        "experiment": {
            "id": "minicache-finance",
            "title": "Finance: answers by calculation",
            "paper": "MiniCache, Tables 3 and 9",
            "about": "Which cache is safe in front of a model that calculates?",
            "baseline": "pot",
        },
        "profile": "laptop",
        "config": {
            "experiment": "minicache-finance",
            "profile": "laptop",
            "pair": {"target": {"kind": "llamacpp", "model": "qwen2.5-1.5b"}, "small": None},
            "cells": cells,
            "baseline": "pot",
        },
        "config_hash": "0" * 64,
        "created": "2026-11-30T12:00:00Z",
        "git": {"commit": "c6b7f0c", "dirty": True},
        "packages": {"reusebench": "0.1.0", "openai": "2.0.0"},
        "machine": {
            "cpu": "Example CPU",
            "cores": 2,
            "ram_bytes": 8 * 2**30,
            "gpu": None,
            "os": "Linux",
            "python": "3.11.9",
        },
        "engines": {
            "target": {"kind": "llamacpp", "model": "qwen2.5-1.5b", "sha256": "ab" * 32, "restarts": 0},
            "small": None,
        },
        "datasets": {
            str(c["id"]): {"source": "builtin", "origin": "generator 1", "sha256": "cd" * 32, "rows": n}
            for c in cells
        },
        "workloads": {
            w: {"version": "1", "primary_score": "strict", "scores": ["strict", "rounded"]} for w in workloads
        },
        "planned": {str(c["id"]): n for c in cells},
        "verdict": None,
        "source": "live",
    }
    return {**run, **changes}, records


def _one(
    cell: dict[str, Any], index: int, clock: float, latency: float, right: float, hit: bool, kind: str | None
) -> Record:
    begin, end = round(clock * NS), round((clock + latency) * NS)
    if kind is None:
        cache = CacheRecord(kind="none")
    elif hit:
        cache = CacheRecord(kind=kind, key="k1", similarity=0.97, reason="entry found")
    else:
        cache = CacheRecord(
            kind="miss", reason="no entry" if index % 3 else "extraction failed: rate missing"
        )
    small = kind == "program" and hit
    calls = () if hit and not small else (call(begin, end - 400_000, engine="small" if small else "target"),)
    return record(
        str(cell["id"]),
        index,
        start=clock,
        latency=latency,
        group=f"g{index % 5}",
        grade=grade(right, max(right, float(index % 11 == 0))),
        cache=cache,
        calls=calls,
        stages=(StageRecord(name="look up", started=begin, finished=begin + 200_000),),
    )
