"""MiniCache under many requests at once, and after a kill."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.engine import Completion, EngineCall
from bench.method import ChatRequest, Environment
from bench.registry import method_class
from bench.samples import Message
from runners import child, encoder, serve
from runners import service as service_module
from runners.client import Endpoint
from runners.journal import Journal
from runners.serve import child_spec, free_socket
from runners.service import Service
from runners.store import Run, list_runs
from tests.encoding import HashEncoder
from tests.methods.test_minicache_method import FORMULA, KINDS, SHARE, WARM, Kind, Pair, play, purpose_of
from tests.running import Watch, config, resume_here, run_here
from tests.serving import QuickExecutor, ask

ROOT = Path(__file__).parents[2]
REQUESTS, FEW, AT_ONCE = 5_000, 1_000, 16
GOOD = (
    *KINDS,
    Kind("Deposit {a} yields {b} coins yearly; interest?", ("deposit", "coins"), "deposit * coins"),
    Kind("Out of {a} invoices {b} went unpaid. How many were settled?", ("all", "unpaid"), "all - unpaid"),
    Kind("Shareholders get {a} euros over {b} stocks; dividend?", ("euros", "stocks"), "euros / stocks"),
    Kind("Tax came to {a} plus a surcharge worth {b}: sum?", ("tax", "surcharge"), "tax + surcharge"),
)
BAD = Kind("Bonds near {a} mature within {b} summers, duration?", ("bonds", "summers"), "bonds / summers")
"""Of its kind no entry is ever right."""
ALL = (*GOOD, BAD)


def kind_of(text: str) -> Kind:
    return next(kind for kind in ALL if kind.pattern.search(text))


class Talk:
    """Stands in for the engines' client: good replies after a few turns of the loop, in a seeded disorder."""

    chance = random.Random()
    generations: Counter[Kind] = Counter()
    under_way: Counter[Kind] = Counter()

    def __init__(self, session: Any, endpoint: Endpoint, role: Any, trace: Any, recording: Any) -> None:
        self.role = role
        self._trace = trace

    async def chat(
        self, messages: Sequence[Message], *, purpose: Any, params: Mapping[str, Any], emit: Any = None
    ) -> Completion:
        call = EngineCall(self.role, purpose, tokens_in=1, tokens_out=1)
        self._trace.calls.append(call)
        body = {"messages": list(messages), **params}
        assert purpose_of(body) in (purpose, "extract")
        kind = kind_of(str(messages[-1]["content"])) if purpose != "reflect" else None
        if purpose == "generate":
            assert kind is not None
            self.generations[kind] += 1
            self.under_way[kind] += 1
            assert self.under_way[kind] == 1, "two generations of one group at a time"
        for _ in range(self.chance.randrange(12)):
            await asyncio.sleep(0)
        if purpose == "generate":
            assert kind is not None
            self.under_way[kind] -= 1
        text = kind.entry("bonds + summers") if purpose == "generate" and kind is BAD else play(body, ALL)
        return Completion(text, "stop", call)


class Quiet(QuickExecutor):
    """Runs programs at once, and lets others have a turn before the result is seen."""

    async def run(self, code: str, *, arguments: dict[str, object] | None = None) -> Any:
        await asyncio.sleep(0)
        return await super().run(code, arguments=arguments)


def service_on(state: Path | None) -> Service:
    cls: Any = method_class("minicache")
    environment = Environment(FORMULA, Quiet(), HashEncoder())
    method = cls(cls.Config(parallel_generations=4, split=False), environment)
    endpoints: Any = {role: Endpoint("http://nowhere/v1") for role in ("target", "small")}
    service = Service("minicache", method, environment, endpoints, Journal(state))
    service.restore()
    service.session = object()  # type: ignore[assignment]
    return service


async def driven(texts: Sequence[str], at_once: int, state: Path | None) -> tuple[Service, list[Any]]:
    """Answer every text, so many at a time, and wait for the work beside."""
    Talk.chance = random.Random(1)
    Talk.generations, Talk.under_way = Counter(), Counter()
    service = service_on(state)
    replies: list[Any] = [None] * len(texts)
    positions = iter(range(len(texts)))

    async def worker() -> None:
        for at in positions:
            request = ChatRequest("m", ({"role": "user", "content": texts[at]},))
            context = service_module._Context(service, f"r{at}", service_module._ignore)
            replies[at] = await service_module._answer(service, request, context)

    await asyncio.gather(*(worker() for _ in range(at_once)))
    await service.background.idle(20)
    assert service.background.running == 0
    return service, replies


async def test_many_requests_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(service_module, "InstrumentedClient", Talk)
    chance = random.Random(5)
    drawn = [(chance.choice(ALL), chance.randint(1, 400), chance.randint(401, 999)) for _ in range(REQUESTS)]
    texts = [kind.request(a, b) for kind, a, b in drawn]
    service, replies = await driven(texts, AT_ONCE, tmp_path / "state.jsonl")

    assert [reply.text for reply in replies] == [kind.answer(a, b) for kind, a, b in drawn]
    assert all(work["outcome"] == "ok" for work in service.background.finished)
    assert [Talk.generations[kind] for kind in GOOD] == [1] * len(GOOD)
    assert Talk.generations[BAD] == 9  # three attempts at each of three triggers

    method: Any = service.method
    groups = method.describe()["groups"]
    assert len(groups) == len(ALL)
    missed = Counter(kind_of(text) for text, one in zip(texts, replies, strict=True) if not one.cache.hit)
    hits = Counter(kind_of(text) for text, one in zip(texts, replies, strict=True) if one.cache.hit)
    for shown, group in zip(groups, method._groups.all, strict=True):
        kind = kind_of(shown["exemplars"][0])
        assert {kind_of(text) for text in shown["exemplars"]} == {kind}
        assert group.seen == missed[kind]  # none is lost, none is counted twice
        assert shown["hits"] == hits[kind]
        assert shown["requests"] == missed[kind] + hits[kind]
        assert shown["state"] == ("uncacheable" if kind is BAD else "cached")
        assert (missed[kind] >= 3) and (hits[kind] == 0) is (kind is BAD)

    service.journal.close()
    again: Any = service_on(tmp_path / "state.jsonl").method
    assert list(again.snapshot()) == list(method.snapshot())
    _, alone = await driven(texts[:FEW], 1, None)
    assert [reply.text for reply in alone] == [reply.text for reply in replies[:FEW]]


# After a kill

QUICK = (
    "import runners.serve as serve; from tests.encoding import HashEncoder; "
    "serve.SentenceEncoder = HashEncoder; serve.main()"
)
"""What a child of the runner runs, without the real encoder."""


def quick_command(spec: Path, sock: Any) -> list[str]:
    own = serve.child_command(spec, sock)
    assert own[1:3] == ["-m", "runners.serve"]
    return [sys.executable, "-c", QUICK, *own[3:]]


class Child:
    """A service in a process of its own."""

    def __init__(self, pair: Pair, state: Path, **settings: Any) -> None:
        spec = state.with_suffix(".json")
        spec.write_text(child_spec("minicache", settings, "formula", pair.endpoints, state))  # type: ignore[arg-type]
        with free_socket() as sock:
            self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            self.process = subprocess.Popen(
                quick_command(spec, sock), cwd=ROOT, pass_fds=(sock.fileno(),), stdin=subprocess.DEVNULL
            )

    async def __aenter__(self) -> Child:
        self._http = aiohttp.ClientSession()
        deadline = time.monotonic() + 30
        while True:
            try:
                assert await self.get("/health")
                return self
            except aiohttp.ClientError:
                assert self.process.poll() is None and time.monotonic() < deadline
                await asyncio.sleep(0.02)

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
        self.kill()

    async def get(self, path: str) -> Any:
        async with self._http.get(self.url + path) as reply:
            return await reply.json()

    async def chat(self, text: str) -> tuple[str, str]:
        async with self._http.post(f"{self.url}/v1/chat/completions", json=ask(text)) as reply:
            body = await reply.json()
            return body["choices"][0]["message"]["content"], body["reusebench"]["cache"]["kind"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


async def test_a_killed_service_is_warm_again_at_once(tmp_path: Path) -> None:
    pair, state, fees = Pair(), tmp_path / "state.jsonl", KINDS[1]
    async with pair:
        async with Child(pair, state) as first:
            for values in WARM:
                assert (await first.chat(SHARE.request(*values)))[1] == "miss"
            assert (await first.get("/admin/background?wait_s=20"))["running"] == 0
            assert await first.chat(SHARE.request(33, 44)) == ("75.00", "program")
            pair.gates["generate"] = asyncio.Event()  # the kill comes in the middle of one
            for values in WARM:
                await first.chat(fees.request(*values))
            before = (await first.get("/admin/cache"))["events"]
            assert (await first.get("/admin/background"))["running"] == 1
            first.kill()
        with state.open("ab") as file:
            file.write(b'{"request": "torn", "event": {"op": "hi')
        pair.gates.pop("generate").set()
        asked = len(pair.target.bodies)
        async with Child(pair, state) as second:
            assert (await second.get("/admin/cache"))["events"] == before
            assert await second.chat(SHARE.request(11, 44)) == ("25.00", "program")
            assert len(pair.target.bodies) == asked
            # What the killed generation was for is made at the next exemplar.
            assert (await second.chat(fees.request(7, 9)))[1] == "miss"
            await second.get("/admin/background?wait_s=20")
            assert await second.chat(fees.request(8, 9)) == ("72.00", "program")


def data_of(folder: Path, n: int) -> tuple[Path, dict[str, Any]]:
    """Rows in the data set's form, and engines that solve them."""
    rows, rules = [], []
    for at in range(n):
        text = SHARE.request(at + 3, 10 * at + 91)
        context = f'Use formula Share to answer the question. Formula: S = H / T, Question: "{text}" Answer:'
        rows.append(json.dumps({"context": context, "target": SHARE.answer(at + 3, 10 * at + 91)}))
        rules.append({"match": f"holds {at + 3} units.*program only", "reply": SHARE.program(text)})
    path = folder / "rows.jsonl"
    path.write_text("\n".join(rows))
    return path, {"rules": rules}


def journal_of(run: Run) -> list[dict[str, Any]]:
    (path,) = (run.path / "cache").glob("*minicache*.jsonl")
    return [json.loads(line) for line in path.read_bytes().splitlines() if line.endswith(b"}")]


def test_a_resumed_run_has_no_event_of_a_request_without_a_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(child, "child_command", quick_command)
    monkeypatch.setattr(encoder, "check", lambda: None)
    n, kept = 12, 5
    path, script = data_of(tmp_path, n)
    data = config("minicache-antiunify", script=script)
    data["cells"][0]["selection"] = {"source": "path", "path": str(path)}
    run = run_here(tmp_path / "runs", data)
    records = run.records()
    assert len(records) == n
    assert any(record.hit for record in records) and not all(record.hit for record in records)
    assert len(journal_of(run)) > n  # each request's own, and the entry

    file = run.path / "records.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:kept]))
    recorded = [f"{run.read()['id']}/{one.cell}/{one.repeat}/{one.index}" for one in run.records()]
    seen: list[set[str]] = []

    def look(done: int) -> None:
        seen.append({line["request"].rpartition("/")[0] for line in journal_of(run)})

    resumed = resume_here(run, Watch(look))
    assert [one.hit for one in resumed.records()[kept:]].count(True) > 0
    mine = [f"{run.read()['id']}/{one.cell}/{one.repeat}/{one.index}" for one in resumed.records()]
    assert len(mine) == n and mine[:kept] == recorded
    for done, requests in enumerate(seen, start=kept + 1):
        assert requests <= set(mine[: done + 1])
    assert [one.grade.scores["rounded"] for one in resumed.records() if one.grade is not None] == [1] * n
    assert len(list_runs(tmp_path / "runs")) == 1
