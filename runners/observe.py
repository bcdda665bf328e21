"""One request from the runner's side: sent, timed, graded, and turned into its record."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench.config import Cell
from bench.errors import EngineError, EngineRefused, EngineTimeout, ExecutorFailed
from bench.records import (
    BackgroundRecord,
    CacheRecord,
    CallRecord,
    ErrorInfo,
    GradeRecord,
    Outcome,
    Record,
    StageRecord,
    Times,
)
from bench.samples import Sample
from bench.workload import Workload
from runners.chat import ChatResult, send_chat
from runners.service import REQUEST_HEADER, TRACE_HEADER

__all__ = ["Clock", "Planned", "background_record", "grade_record", "observe"]


class Clock:
    """Nanoseconds since the run's start, on the monotonic clock; goes on where an earlier sitting ended.

    Args:
        already_ns: When that was.
        session: Number of this sitting, from 0.
    """

    def __init__(self, already_ns: int = 0, session: int = 0) -> None:
        self.zero = time.monotonic_ns() - already_ns
        self.session = session

    def now(self) -> int:
        """Return the time since the run's start, ns."""
        return time.monotonic_ns() - self.zero

    def rebase(self, monotonic_ns: int | None) -> int | None:
        """Turn a monotonic reading of this machine, by whatever process, into run time."""
        return None if monotonic_ns is None else monotonic_ns - self.zero


@dataclass(frozen=True, slots=True)
class Planned:
    """One request that a cell is going to make."""

    cell: Cell
    repeat: int
    index: int
    sample: Sample

    @property
    def key(self) -> tuple[str, int, int]:
        """As :attr:`bench.records.Record.key`."""
        return (self.cell.id, self.repeat, self.index)


async def observe(
    session: aiohttp.ClientSession,
    url: str,
    run_id: str,
    planned: Planned,
    attempt: int,
    request_id: str,
    workload: Workload,
    clock: Clock,
) -> Record:
    """Send one sample to the service at ``url`` and return the record of what came of it.

    In a sequential closed loop a request is scheduled when the one before it is over: now.
    """
    body = request_body(planned, workload)
    headers = {REQUEST_HEADER: request_id, TRACE_HEADER: "1"}
    scheduled = clock.now()
    result: ChatResult | None = None
    failure: EngineError | None = None
    try:
        result = await send_chat(
            session, f"{url}/chat/completions", body, headers=headers, timeout_s=planned.cell.timeout_s
        )
    except EngineError as error:
        failure = error
    finished = clock.now()
    told = result.extra if result else failure.body if failure else {}
    trace = _writable(told.get("reusebench") or {})
    reply = _writable(result.text) if result else None
    outcome = _outcome(result, failure)
    grade = None
    if outcome == "ok" and result is not None:
        grade = grade_record(workload, planned.sample, reply or "")
        outcome = "ok" if grade.parsed else "unparsed"
    return Record(
        run=run_id,
        cell=planned.cell.id,
        index=planned.index,
        sample=planned.sample.id,
        group=planned.sample.group,
        prompt=_digest(planned.sample),
        repeat=planned.repeat,
        session=clock.session,
        attempt=attempt,
        times=Times(
            scheduled=scheduled,
            started=scheduled if result is None else max(scheduled, clock.rebase(result.started_ns) or 0),
            received=clock.rebase(trace.get("received_ns")),
            first_token=clock.rebase(result.first_token_ns) if result else None,
            first_content=clock.rebase(result.first_content_ns) if result else None,
            finished=finished,
        ),
        stages=_stages(trace, clock),
        calls=tuple(_call(call, clock) for call in trace.get("calls", ())),
        cache=CacheRecord(**trace["cache"]) if trace.get("cache") else None,
        outcome=outcome,
        grade=grade,
        reply=reply,
        finish_reason=result.finish_reason if result else None,
        usage=_writable(result.usage) if result else None,
        error=_error(failure) if failure else None,
        details=trace.get("details") or {},
    )


def background_record(run_id: str, cell: str, told: Mapping[str, Any], clock: Clock) -> BackgroundRecord:
    """Return the record of work that a service reports to have done beside its requests."""
    told = _writable(dict(told))
    return BackgroundRecord(
        run=run_id,
        cell=cell,
        name=told["name"],
        request=told["request"],
        session=clock.session,
        started=told["received_ns"] - clock.zero,
        finished=told["finished_ns"] - clock.zero,
        stages=_stages(told, clock),
        calls=tuple(_call(call, clock) for call in told["calls"]),
        outcome=told["outcome"],
        error=ErrorInfo(**told["error"]) if told.get("error") else None,
        details=told.get("details") or {},
    )


def _stages(trace: Mapping[str, Any], clock: Clock) -> tuple[StageRecord, ...]:
    return tuple(
        StageRecord(name=name, started=start - clock.zero, finished=clock.rebase(end))
        for name, start, end in trace.get("stages", ())
    )


def _digest(sample: Sample) -> str:
    text = json.dumps([dict(message) for message in sample.messages], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def request_body(planned: Planned, workload: Workload) -> dict[str, Any]:
    """Return what is sent: the messages and the sampling parameters, and nothing of the gold."""
    body: dict[str, Any] = {
        "model": planned.cell.method,
        "messages": [dict(message) for message in planned.sample.messages],
        "temperature": 0,
        "max_tokens": workload.task.max_tokens,
        "seed": planned.cell.selection.seed,
        "stream": planned.cell.stream,
    }
    if planned.cell.stream:
        body["stream_options"] = {"include_usage": True}
    return body


def grade_record(workload: Workload, sample: Sample, reply: str) -> GradeRecord:
    """Grade a complete reply."""
    grade = workload.grade(sample, reply)
    return GradeRecord(
        scores=dict(grade.scores),
        extracted=grade.extracted,
        parsed=grade.parsed,
        explanation=grade.explanation,
        workload_version=workload.version,
    )


def _error(failure: EngineError) -> ErrorInfo:
    return ErrorInfo(type=_code(failure) or failure.kind, message=_writable(str(failure)))


def _writable(value: Any) -> Any:
    """Mend text that UTF-8 can't hold: JSON brings halves of UTF-16 pairs where a server cut between them."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {_writable(key): _writable(one) for key, one in value.items()}
    return [_writable(one) for one in value] if isinstance(value, list) else value


def _outcome(result: ChatResult | None, failure: EngineError | None) -> Outcome:
    if failure is not None:
        code = _code(failure)
        if isinstance(failure, EngineTimeout) or code == EngineTimeout.kind:
            return "timeout"
        if isinstance(failure, EngineRefused):
            return "refused"
        return "sandbox_error" if code == ExecutorFailed.__name__ else "infra_error"
    return "truncated" if result is not None and result.finish_reason == "length" else "ok"


def _code(failure: EngineError) -> str | None:
    """Return what the service says has failed behind it."""
    error = failure.body.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return str(code) if code else None


def _call(call: Mapping[str, Any], clock: Clock) -> CallRecord:
    times = ("started_ns", "first_token_ns", "first_content_ns", "finished_ns")
    fields = {
        name.removesuffix("_ns") if name in times else name: clock.rebase(value) if name in times else value
        for name, value in call.items()
    }
    return CallRecord.model_validate(fields)
