"""What every registered method and variant must do, with no code of its own here."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import shutil
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from bench.config import Cell
from bench.engine import Purpose
from bench.method import CacheEvent, CacheKind, Stateful
from bench.registry import method_class, names, variant, workload
from bench.workload import GenericTask, Selection, Task
from methods.execution import IsolatedExecutor
from runners.observe import Planned, request_body
from runners.serve import roles_of
from tests.serving import Answer, Served, ask, serving

METHODS = names("method")
TASKS: dict[str, Task] = {"generic": GenericTask(), **{n: workload(n).task for n in names("workload")}}
SEVERAL = 6
RULES = [
    {"match": rf"item {i}\b", "reply": f"```python\nanswer = {i + 2} * 10\n```\nIt is {i}."}
    for i in range(SEVERAL)
]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

every_method = pytest.mark.parametrize("name", METHODS)
every_task = pytest.mark.parametrize("task", TASKS)


def served(name: str, task: str | None = None, **more: Any) -> AbstractAsyncContextManager[Served]:
    more.setdefault("rules", RULES)
    return serving(name, task=TASKS[task or names("workload")[0]], **more)


def question(i: int) -> str:
    return f"What does item {i} cost?"


def distant_question(i: int) -> str:
    """A question that no similarity takes for another one's."""
    wares = ("copper kettles by weight", "a night train", "piano lessons in June", "two acres of vineyard")
    return f"{wares[i]}, item {i}?"


def said(answer: Answer) -> tuple[Any, ...]:
    """What a client sees of an answer; neither times nor ids."""
    return answer.status, answer.text, answer.finish, answer.cache["kind"], answer.cache["key"]


def is_hit(answer: Answer) -> bool:
    return CacheEvent(**answer.cache).hit


@every_method
def test_the_settings_have_documentation_defaults_and_no_other_keys(name: str) -> None:
    spec = variant(name)
    cls: Any = method_class(spec.method)
    assert inspect.getdoc(cls)
    config = cls.Config()
    assert isinstance(config, BaseModel)
    documentation = " ".join(inspect.getdoc(c) or "" for c in cls.Config.__mro__ if issubclass(c, BaseModel))
    for field in cls.Config.model_fields:
        assert f"{field}:" in documentation
    json.dumps(cls.Config(**spec.config).model_dump(mode="json"))
    with pytest.raises(ValidationError):
        cls.Config(no_such_key=1)
    with pytest.raises(ValidationError):
        config.__setattr__(next(iter(cls.Config.model_fields)), None)
    roles = roles_of(name, {})
    assert roles and set(roles) <= {"target", "small"}


@every_task
@every_method
async def test_the_answer_is_the_same_with_and_without_a_stream(name: str, task: str) -> None:
    async with served(name, task) as plain, served(name, task) as streamed:
        for i in (0, 1, 0):
            whole = await plain.chat(question(i))
            pieces = await streamed.chat(question(i), **USAGE)
            assert whole.ok and whole.text
            assert said(pieces) == said(whole)
            assert pieces.usage == whole.usage
            assert pieces.events[-1] == "[DONE]"
        mixed = await plain.chat(question(0), **USAGE)
        assert (mixed.text, mixed.finish) == ((await plain.chat(question(0))).text, "stop")


@every_method
async def test_every_engine_call_is_in_the_trace(name: str) -> None:
    async with served(name) as service:
        seen = 0
        for i in (0, 0, 1, 2):
            answer = await service.chat(question(i))
            assert answer.cache["kind"] in get_args(CacheKind)
            assert answer.cache["similarity"] is None or -1 <= answer.cache["similarity"] <= 1
            received = answer.extension["received_ns"]
            for stage, started, finished in answer.extension["stages"]:
                assert stage and received <= started <= finished
            for call in answer.calls:
                assert call["purpose"] in get_args(Purpose)
                times = [call[f"{when}_ns"] for when in ("started", "first_token", "first_content")]
                times.append(call["finished_ns"])
                assert received <= times[0] and times == sorted(times)
                assert call["tokens_in"] > 0 and call["tokens_out"] > 0
                assert call["tries"] == 1 and call["error"] is None and call["finish_reason"]
            assert answer.usage is not None
            assert answer.usage["completion_tokens"] == sum(call["tokens_out"] for call in answer.calls)
            assert answer.usage["prompt_tokens"] == sum(call["tokens_in"] for call in answer.calls)
            seen += len(answer.calls)
        for work in await service.background():
            assert work["outcome"] == "ok" and work["details"]
            seen += len(work["calls"])
        assert sum(len(service.requests(role)) for role in service.engines) == seen > 0


@every_method
async def test_it_reaches_only_the_engines_that_it_names(name: str) -> None:
    async with served(name) as service:
        for i in range(SEVERAL):
            answer = await service.chat(question(i))
            assert {call["engine"] for call in answer.calls} <= set(roles_of(name, {}))
        reached = {role for role in service.engines if service.requests(role)}
        assert reached <= set(roles_of(name, {}))
    async with served(name, roles=roles_of(name, {})) as alone:
        assert (await alone.chat(question(0))).ok


@every_method
async def test_a_hit_calls_no_target_and_spends_nothing(name: str) -> None:
    async with served(name) as service:
        first = await service.chat(question(0))
        for stream in (False, True):
            before = len(service.requests("target"))
            again = await service.chat(question(0), **(USAGE if stream else {}))
            assert again.text == first.text
            if is_hit(again):
                assert len(service.requests("target")) == before
                assert all(call["engine"] != "target" for call in again.calls)
                assert again.usage["completion_tokens"] == sum(c["tokens_out"] for c in again.calls)
                assert again.headers["x-reusebench-cache"] == again.cache["kind"]
            else:
                assert len(service.requests(roles_of(name, {})[0])) > 0 and again.calls


@every_method
async def test_the_state_survives_a_restart_and_a_move(name: str, tmp_path: Path) -> None:
    warm, probes = [0, 1, 1, 2, 0], [1, 2, 3, 0, 3]
    original, copy = tmp_path / "state.jsonl", tmp_path / "copy.jsonl"
    async with served(name, state=original) as service:
        first = [said(await service.chat(question(i))) for i in warm]
        await service.background()
        events = await service.events()
        if not isinstance(service.method, Stateful):
            assert events == [] and not original.exists()
            assert (await service.post({"method": name, "events": []}, "/admin/cache", "PUT")).status == 400
            return
        assert events and (await service.events()) == events
        json.dumps(events, allow_nan=False)
        shutil.copy(original, copy)
        expected = [said(await service.chat(question(i))) for i in probes]
        await service.background()
        after = await service.events()

        assert (await service.post({}, "/admin/reset")).status == 200
        assert await service.events() == [] and original.read_text() == ""
        assert not is_hit(await service.chat(question(0)))
        await service.post({}, "/admin/reset")
        put = await service.post({"method": name, "events": events}, "/admin/cache", "PUT")
        assert put.status == 200
        assert await service.events() == events
        assert [said(await service.chat(question(i))) for i in probes] == expected
        await service.background()
        assert await service.events() == after

    for journal in (copy, original):  # replayed change by change, and from what was put
        async with served(name, state=journal) as restarted:
            if journal == copy:
                assert await restarted.events() == events
                assert [said(await restarted.chat(question(i))) for i in probes] == expected
                await restarted.background()
            assert await restarted.events() == after
            await restarted.post({}, "/admin/reset")
            assert [said(await restarted.chat(question(i))) for i in warm] == first


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("500", 502),
        ("429", 429),
        ("400", 400),
        ("disconnect", 502),
        ("cut_stream", 502),
        ("error_event", 502),
        ("role_only", 502),
        ("stall", 504),
    ],
)
@every_method
async def test_an_engine_failure_is_an_error_and_leaves_nothing(name: str, fault: str, status: int) -> None:
    fail = {"match": r"item 0\b", "fault": fault, "reply": "```python\nanswer = 1\n```", "times": 1}
    async with served(name, rules=[fail, fail, *RULES], endpoint={"timeout_s": 0.25}) as service:
        before = await service.events()
        plain = await service.chat(question(0))
        streamed = await service.chat(question(0), **USAGE)
        assert plain.status == status
        assert plain.error is not None and plain.error["message"]
        assert set(plain.error) == {"message", "type", "param", "code"}
        assert not streamed.ok and streamed.error is not None and "[DONE]" not in streamed.events
        for answer in (plain, streamed):
            assert [call["error"] is not None for call in answer.calls] == [True]
        assert await service.events() == before
        mended = await service.chat(question(0))
        assert mended.ok and not is_hit(mended)
    async with served(name) as sound:
        assert said(await sound.chat(question(0))) == said(mended)


@pytest.mark.parametrize(
    "poor",
    [
        {"finish_reason": "length", "reply": "The total is 4"},
        {"fault": "empty"},
        {"reply": "", "reasoning": "The answer is 9.8"},
    ],
    ids=["truncated", "empty", "in the reasoning channel"],
)
@every_method
async def test_a_poor_reply_is_passed_on_and_never_kept(name: str, poor: dict[str, Any]) -> None:
    async with served(name, rules=[{"match": r"item 0\b", **poor}]) as service:
        before = await service.events()
        for _ in range(2):
            calls = sum(len(service.requests(role)) for role in service.engines)
            answer = await service.chat(question(0))
            assert answer.status == 200 and not is_hit(answer)
            assert answer.finish == poor.get("finish_reason", "stop")
            assert sum(len(service.requests(role)) for role in service.engines) > calls
        assert await service.events() == before


@every_method
async def test_parallel_requests_get_their_own_answers(name: str) -> None:
    async with served(name) as alone:
        expected = [(await alone.chat(distant_question(i))).text for i in range(4)]
    rules = [{**rule, "delay_s": 0.02} for rule in RULES]
    order = [0, 1, 0, 2, 0, 3, 0, 0]
    async with served(name, rules=rules, executor=IsolatedExecutor(concurrency=2)) as service:
        answers = await asyncio.gather(
            *(service.chat(distant_question(i), **(USAGE if n % 2 else {})) for n, i in enumerate(order))
        )
        assert [answer.text for answer in answers] == [expected[i] for i in order]
        assert [(await service.chat(distant_question(i))).text for i in range(4)] == expected


TOOLS = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}]
HISTORY = [
    {"role": "user", "content": "price of item 1 ?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "price", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "12.5"},
]
ANOTHER = (
    "item 1 ? Which merchants nearby would deliver twenty of them before Thursday, and how heavy is that?"
)


@every_method
async def test_tools_their_results_and_null_content_are_accepted(name: str) -> None:
    async with served(name) as service:
        for body in (
            {"messages": HISTORY},
            {"messages": HISTORY, "tools": TOOLS},
            {"messages": [*HISTORY, {"role": "user", "content": [{"type": "text", "text": ANOTHER}]}]},
        ):
            before = sum(len(service.requests(role)) for role in service.engines)
            answer = await service.post({"model": "m", **body})
            assert answer.ok and answer.text
            sent = [r for role in service.engines for r in service.requests(role)]
            assert len(sent) > before  # three different requests: none of them is a hit
            text = json.dumps(sent[-1])
            assert "None" not in text and "12.5" in text
            assert sent[-1].get("tools") == body.get("tools")


@pytest.mark.parametrize("task", names("workload"))
@every_method
async def test_no_gold_reaches_a_method(name: str, task: str) -> None:
    (sample,), _ = workload(task).load(Selection(n=1, seed=3))
    marked = dataclasses.replace(
        sample, id="ID-f3a9", reference="GOLD-f3a9", group="GROUP-f3a9", meta={"META-f3a9": "META-f3a9"}
    )
    cell = Cell(method=name, workload=task)
    async with served(name, task) as service:
        answer = await service.post(request_body(Planned(cell, 0, 0, marked), workload(task)))
        assert answer.ok
        sent = json.dumps([service.requests(role) for role in service.engines])
        assert sent != "[[], []]" and "f3a9" not in sent
        assert "f3a9" not in json.dumps(await service.events())


@every_method
async def test_the_same_requests_give_the_same_replies(name: str) -> None:
    runs = []
    for _ in range(2):
        async with served(name) as service:
            runs.append([said(await service.chat(question(i))) for i in (0, 1, 0, 2, 2, 5)])
    assert runs[0] == runs[1]


@every_method
async def test_what_changes_the_output_is_never_answered_by_another_request(name: str) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"max_tokens": 60},
        {"max_tokens": 61},
        {"temperature": 0},
        {"temperature": 0.5},
        {"stop": ["~"]},
        {"seed": 1},
        {"model": "other"},
        {"response_format": {"type": "json_object"}},
        {"tools": TOOLS},
    ]
    async with served(name) as service:
        for change in variants:
            answer = await service.post({**ask(question(0)), **change})
            assert answer.ok and answer.cache["kind"] != "exact"
