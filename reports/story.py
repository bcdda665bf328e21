"""The story of one request, told from its record: routed where, hit or missed why, and what it set off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.metrics import NS
from bench.records import BackgroundRecord, CallRecord, Record
from reports.tables import plain

__all__ = ["set_off", "story"]

_MOST = 2000
"""Characters of one text that are shown."""


def set_off(record: Record, background: Sequence[BackgroundRecord]) -> list[BackgroundRecord]:
    """Return the work beside the requests that a request began."""
    request = f"{record.run}/{record.cell}/{record.repeat}/{record.index}/{record.attempt}"
    return [work for work in background if work.request == request]


def story(record: Record, work: Sequence[BackgroundRecord]) -> str:
    """Return what happened to one request, as plain text.

    Args:
        record: The request.
        work: What it set off.
    """
    lines = [f"{record.cell}, request {record.index + 1}: sample {record.sample}"]
    if record.group:
        lines.append(f"  the sample's template: {record.group}")
    details = dict(record.details)
    lines += _routing(details.pop("route", None))
    lines.append(f"  outcome: {_outcome(record)}")
    lines += _facts(details, "  ")
    if record.reply is not None:
        lines.append(f"  reply: {_short(record.reply)}")
    if record.grade is not None:
        lines.append(f"  grade: {record.grade.explanation}")
    if record.error is not None:
        lines.append(f"  error: {record.error.type}: {record.error.message}")
    lines.append(f"  {_seconds(record.latency_ns)} in all:")
    begin = record.times.received if record.times.received is not None else record.times.started
    moments = [
        (stage.started, _stage(stage.name, stage.started, stage.finished, begin)) for stage in record.stages
    ]
    moments += [(call.started or begin, _call(call, begin)) for call in record.calls]
    lines += [text for _, text in sorted(moments, key=lambda one: one[0])]
    for one in work:
        lines += ["", *_beside(one)]
    return plain("\n".join(lines)) + "\n"


def _routing(route: Any) -> list[str]:
    if not isinstance(route, Mapping):
        return []
    place = next((f"{key} {route[key]}" for key in ("group", "cluster") if route.get(key) is not None), None)
    cosine = route.get("similarity")
    near = "" if cosine is None else f", cosine {cosine:.3f}"
    lines = [f"  routed to {place}{near}" if place else f"  routed to nothing known{near}"]
    pieces, read = route.get("pieces"), route.get("read")
    if pieces and read is not None and read < pieces:
        lines.append(f"  the encoder read {read} of {pieces} word pieces")
    return lines


def _outcome(record: Record) -> str:
    cache = record.cache
    if cache is None or cache.kind == "none":
        return record.outcome
    verdict = "miss" if cache.kind == "miss" else f"hit ({cache.kind})"
    about = [cache.key, cache.reason, None if cache.similarity is None else f"cosine {cache.similarity:.3f}"]
    return ", ".join([verdict, *(text for text in about if text), record.outcome])


def _facts(details: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for key, value in details.items():
        if value is None:
            continue
        text = _short(value if isinstance(value, str) else _plain_value(value))
        if "\n" in text.strip():
            lines.append(f"{indent}{key}:")
            lines += [f"{indent}  | {line}" for line in text.strip().splitlines()]
        else:
            lines.append(f"{indent}{key}: {text.strip()}")
    return lines


def _plain_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {one}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(str(one) for one in value)
    return str(value)


def _short(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[:_MOST]} … ({len(text) - _MOST} characters more)"


def _seconds(ns: int) -> str:
    return f"{ns / NS:.3f} s"


def _stage(name: str, started: int, finished: int | None, begin: int) -> str:
    took = "unfinished" if finished is None else _seconds(finished - started)
    return f"    {(started - begin) / NS:8.3f} s  {name}: {took}"


def _call(call: CallRecord, begin: int) -> str:
    at = ((call.started or begin) - begin) / NS
    took = _seconds(call.finished - call.started) if call.finished and call.started else "unfinished"
    cached = f", {call.tokens_cached} of them cached" if call.tokens_cached else ""
    drafted = (
        f", {call.tokens_accepted} of {call.tokens_drafted} drafts accepted" if call.tokens_drafted else ""
    )
    failed = f", failed: {call.error.message}" if call.error else ""
    return (
        f"    {at:8.3f} s    {call.engine} engine, {call.purpose}: {took}, "
        f"{call.tokens_in} tokens in{cached}, {call.tokens_out} out{drafted}{failed}"
    )


def _beside(work: BackgroundRecord) -> list[str]:
    details = dict(work.details)
    attempts = details.pop("attempts", [])
    lines = [f"  It set off: {work.name}, {work.outcome}, {_seconds(work.finished - work.started)}"]
    if work.error is not None:
        lines.append(f"    error: {work.error.type}: {work.error.message}")
    lines += _facts(details, "    ")
    for attempt in attempts:
        facts = dict(attempt)
        number, round_ = facts.pop("attempt", "?"), facts.pop("round", None)
        lines.append(f"    attempt {number}" + (f", round {round_}" if round_ else ""))
        entry = facts.pop("entry", None)
        if isinstance(entry, Mapping):
            for variable in entry.get("template", ()):
                lines.append(
                    f"      variable {variable['name']} ({variable['type']}): {variable['description']}"
                )
            facts = {"program": entry.get("code"), **facts}
        lines += _facts(facts, "      ")
    lines += [_call(call, work.started) for call in work.calls]
    return lines
