"""What a service counts about itself: Prometheus metrics and the numbers of ``/admin/stats``."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import prometheus_client as prometheus

from bench.errors import ReuseBenchError
from bench.method import Reply, Trace

__all__ = ["Telemetry"]

_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128)
"""Seconds: from a cache hit to a long generation."""


class Telemetry:
    """Counters of one service, in a registry of its own."""

    content_type = prometheus.CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        registry = self._registry = prometheus.CollectorRegistry()
        self._requests = prometheus.Counter(
            "reusebench_requests", "Requests.", ["outcome", "cache"], registry=registry
        )
        self._latency = prometheus.Histogram(
            "reusebench_request_seconds",
            "Time inside the service of answered requests.",
            ["cache"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._in_flight = prometheus.Gauge(
            "reusebench_requests_in_flight", "Requests being answered.", registry=registry
        )
        self._calls = prometheus.Counter(
            "reusebench_engine_calls", "Engine calls.", ["engine", "purpose", "outcome"], registry=registry
        )
        self._tokens = prometheus.Counter(
            "reusebench_engine_tokens", "Engine tokens.", ["engine", "direction"], registry=registry
        )
        self._state = prometheus.Gauge(
            "reusebench_state", "The method's own counters and sizes.", ["name"], registry=registry
        )
        self._totals: Counter[str] = Counter()

    @contextmanager
    def request(self, trace: Trace) -> Iterator[Callable[[Reply], None]]:
        """Count one request; call the yielded function with its reply, or leave by an exception."""
        kind, outcome = "none", "error"

        def done(reply: Reply) -> None:
            nonlocal kind, outcome
            kind, outcome = reply.cache.kind, "ok"

        self._in_flight.inc()
        try:
            yield done
        except ReuseBenchError as error:
            outcome = type(error).__name__
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._in_flight.dec()
            self._requests.labels(outcome, kind).inc()
            if outcome == "ok":  # a quick failure is no quick answer
                self._latency.labels(kind).observe((time.monotonic_ns() - trace.received_ns) / 1e9)
            self._totals["total"] += 1
            self._totals["ok" if outcome == "ok" else "failed"] += 1
            self.count_calls(trace)

    def count_calls(self, trace: Trace) -> None:
        """Count the engine calls of a finished request or piece of background work."""
        for call in trace.calls:
            self._calls.labels(call.engine, call.purpose, "error" if call.error else "ok").inc()
            self._tokens.labels(call.engine, "in").inc(call.tokens_in or 0)
            self._tokens.labels(call.engine, "out").inc(call.tokens_out or 0)

    def summary(self) -> dict[str, int]:
        """Return how many requests came, and how many were answered and failed."""
        return {name: self._totals[name] for name in ("total", "ok", "failed")}

    def render(self, stats: Mapping[str, int | float | str]) -> str:
        """Return everything in Prometheus' text format."""
        for name, value in stats.items():
            if isinstance(value, int | float):
                self._state.labels(name).set(value)
        return prometheus.generate_latest(self._registry).decode()
