"""MiniCache end to end, on mock engines: misses, entries made beside them, hits, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from bench.config import Cell
from data.formula.task import FormulaTask
from runners.child import ServiceProcess
from runners.client import Endpoint
from runners.engines.mock import MockEngine
from tests.serving import Answer, Served, serving, until

NUMBERS = [(500, 300), (80, 20), (900, 90), (640, 160), (200, 150), (1000, 1), (70, 7), (60, 45)]
ENTRY = "```python\ndef solve(sales: float, costs: float):\n    return (sales - costs) / sales * 100\n```"
WRONG = "```python\ndef solve(sales: float, costs: float):\n    return sales + costs\n```"
BARE = "```python\nanswer = 5\n```"


def ask(at: int) -> str:
    sales, costs = NUMBERS[at]
    return f"Sales {sales}, and costs {costs}. What is the margin?"


def margin(at: int) -> str:
    sales, costs = NUMBERS[at]
    return f"{(sales - costs) / sales * 100:.2f}"


def rule(match: str, reply: str, **more: Any) -> dict[str, Any]:
    return {"match": match, "reply": reply, **more}


def programs(**more: Any) -> list[dict[str, Any]]:
    """What the target answers to PoT's prompt."""
    return [
        rule(
            rf"into a short Python program.*Request: Sales {sales},",
            f"```python\nsales = {sales}\ncosts = {costs}\nanswer = (sales - costs) / sales * 100\n```",
            **more,
        )
        for sales, costs in NUMBERS
    ]


def extractions() -> list[dict[str, Any]]:
    """What the small model finds."""
    return [
        rule(
            rf"value of each variable.*Sales {sales},", json.dumps({"sales": str(sales), "costs": str(costs)})
        )
        for sales, costs in NUMBERS
    ]


def entries(*replies: str, **more: Any) -> list[dict[str, Any]]:
    """What the target writes, one reply after the other; the last one again and again."""
    first = [rule("solved requests of one kind", reply, times=1, **more) for reply in replies[:-1]]
    return [*first, rule("solved requests of one kind", replies[-1], **more)]


REFLECT = rule("find out why", "It added instead of dividing.")


def cache(
    *rules: dict[str, Any], name: str = "minicache", state: Path | None = None, **config: Any
) -> AbstractAsyncContextManager[Served]:
    """With a small model that is asked even what can have a single answer, so that it can be watched."""
    everything = [*rules, REFLECT, *entries(ENTRY), *extractions(), *programs()]
    config = {"ask": "always", **config}
    return serving(name, rules=everything, task=FormulaTask(), config=config, state=state)


async def shown(service: Served) -> list[dict[str, Any]]:
    return (await service.get("/admin/cache"))["state"]["groups"]


def purposes(service: Served, role: Any = "target") -> Counter[str]:
    marks = {
        "solved requests of one kind": "generate",
        "find out why": "reflect",
        "value of each variable": "extract",
        "into a short Python program": "program",
    }
    found: Counter[str] = Counter()
    for request in service.requests(role):
        text = request["messages"][0]["content"]
        found[next(purpose for mark, purpose in marks.items() if mark in text)] += 1
    return found


async def warm(service: Served, n: int = 3) -> list[Answer]:
    answers = [await service.chat(ask(at)) for at in range(n)]
    await service.background()
    return answers


async def test_three_misses_make_an_entry_and_the_fourth_request_is_a_hit() -> None:
    async with cache() as service:
        answers = await warm(service)
        assert [one.cache["kind"] for one in answers] == ["miss"] * 3
        assert [one.cache["reason"] for one in answers[1:]] == ["the group has no entry yet"] * 2
        assert [one.text for one in answers] == [margin(at) for at in range(3)]
        before = len(service.requests("target"))
        hit = await service.chat(ask(3))
        assert (hit.cache["kind"], hit.cache["key"], hit.text) == ("program", "group-0/1", margin(3))
        assert len(service.requests("target")) == before
        assert [call["purpose"] for call in hit.calls] == ["extract"]
        details = hit.extension["details"]
        assert details["values"] == {"sales": 640, "costs": 160}
        assert details["route"]["group"] == 0 and not details["route"]["new"]
        assert details["route"]["read"] == details["route"]["pieces"] > 0
        (work,) = await service.background()
        assert (work["name"], work["outcome"], work["details"]["outcome"]) == ("generate", "ok", "accepted")
        assert (work["details"]["attempted"], work["details"]["accepted"]) == (1, 1)
        assert [call["purpose"] for call in work["calls"]] == ["generate", *["validate"] * 3]
        (group,) = await shown(service)
        assert (group["state"], group["hits"], group["requests"]) == ("cached", 1, 4)
        assert "solve" in group["entry"]["code"] and len(group["exemplars"]) == 3
        small = service.requests("small")[-1]
        assert small["response_format"]["json_schema"]["schema"]["required"] == ["sales", "costs"]
        assert small["messages"][-1]["content"] == ask(3)


async def test_another_kind_of_request_opens_a_group_of_its_own() -> None:
    async with cache(rule("Population", BARE)) as service:
        await warm(service)
        other = await service.chat("Population growth of Velmora from 30 people to 45, in per cent, please?")
        assert other.cache["kind"] == "miss" and "a new one" in other.cache["reason"]
        assert len(await shown(service)) == 2


async def test_another_model_or_system_prompt_is_another_group() -> None:
    async with cache() as service:
        await warm(service)
        for body in (
            {"model": "other", "messages": [{"role": "user", "content": ask(3)}]},
            {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ask(3)}]},
        ):
            answer = await service.post({"model": "minicache", **body})
            assert answer.cache["kind"] == "miss" and "a new one" in answer.cache["reason"]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"sales": "640", "costs": "640"}, "are both '640'"),
        ({"sales": "640"}, "costs is missing"),
        ({"sales": "640", "costs": "161"}, "not in the request"),
        ({"sales": "160", "costs": "640"}, "fits better"),
        ("nonsense", "no JSON"),
    ],
)
async def test_an_extraction_that_can_t_be_used_is_a_miss(found: Any, reason: str) -> None:
    # Shots of the same words as the request would make every role clear; here nothing is.
    text = found if isinstance(found, str) else json.dumps(found)
    async with cache(rule("each variable.*Sales 640,", text), margin=10.0) as service:
        await warm(service)
        answer = await service.chat(ask(3))
        assert answer.cache["kind"] == "miss" and reason in answer.cache["reason"]
        assert answer.text == margin(3)
        assert reason in answer.extension["details"]["refused"]
        (group,) = await shown(service)
        assert (group["refused"], len(group["exemplars"])) == (1, 4)


async def test_a_request_without_enough_values_asks_nobody() -> None:
    async with cache(rule("Request: Sales 640", BARE)) as service:
        await warm(service)
        before = len(service.requests("small"))
        answer = await service.chat("Sales 640, and costs. What is the margin?")
        assert answer.cache["reason"] == "refused: 2 numbers wanted, 1 in the request"
        assert len(service.requests("small")) == before


async def test_clear_roles_leave_the_small_model_one_choice_or_are_not_asked_for() -> None:
    async with cache() as service:
        await warm(service)
        hit = await service.chat(ask(3))
        schema = service.requests("small")[-1]["response_format"]["json_schema"]["schema"]
        assert hit.extension["details"]["choices"] == "one"
        assert schema["properties"] == {"sales": {"enum": ["640"]}, "costs": {"enum": ["160"]}}
    async with cache(ask="open") as service:
        await warm(service)
        before = len(service.requests("small"))
        hit = await service.chat(ask(3))
        assert (hit.cache["kind"], hit.text, hit.calls) == ("program", margin(3), [])
        assert len(service.requests("small")) == before == 0
    async with cache(choices="all") as service:
        await warm(service)
        await service.chat(ask(3))
        schema = service.requests("small")[-1]["response_format"]["json_schema"]["schema"]
        assert schema["properties"]["sales"] == {"enum": ["640", "160"]}


async def test_a_failed_attempt_is_reflected_on_and_the_next_one_told() -> None:
    async with cache(*entries(WRONG, ENTRY)) as service:
        await warm(service)
        (work,) = await service.background()
        first, second = work["details"]["attempts"]
        assert "no choice of its values gives its answer" in first["failures"][0]
        assert first["summary"] == "It added instead of dividing." and all(second["passed"])
        assert purposes(service)["reflect"] == 1
        prompt = [r["messages"][1]["content"] for r in service.requests() if "of one kind" in str(r)][-1]
        assert "It added instead of dividing." in prompt
        assert (await service.chat(ask(3))).cache["key"] == "group-0/1"
    async with cache(*entries(WRONG, ENTRY), reflection=False) as service:
        await warm(service)
        assert purposes(service)["reflect"] == 0
        assert (await service.chat(ask(3))).cache["kind"] == "program"


async def test_a_reply_that_is_no_entry_costs_no_validation() -> None:
    bad = "```python\ndef solve(*args):\n    return 1\n```"
    async with cache(*entries(bad), retries=2) as service:
        await warm(service)
        (work,) = await service.background()
        assert [call["purpose"] for call in work["calls"]] == ["generate", "reflect", "generate"]
        assert "name every argument" in work["details"]["attempts"][0]["unusable"]


async def test_failures_back_off_and_end_uncacheable() -> None:
    async with cache(*entries(WRONG), retries=1) as service:
        tried = []
        for at in range(24):
            await service.chat(ask(at % len(NUMBERS)))
            tried.append(len(await service.background()))
        assert [n + 1 for n in range(24) if tried[n] > (tried[n - 1] if n else 0)] == [3, 6, 12]
        (group,) = await shown(service)
        assert group["state"] == "uncacheable" and group["summaries"] == []
        assert (await service.chat(ask(0))).cache["reason"] == "the group is uncacheable"
    async with cache(*entries(WRONG), retries=1, beta=1.0) as service:
        for at in range(6):
            await service.chat(ask(at))
            await service.background()
        assert len(await service.background()) == 3


async def test_without_validation_the_first_entry_is_taken() -> None:
    async with cache(*entries(WRONG), validation=False) as service:
        await warm(service)
        wrong = await service.chat(ask(3))
        assert (wrong.cache["kind"], wrong.text) == ("program", "800.00")


async def test_anti_unification_makes_entries_without_a_call() -> None:
    async with cache(name="minicache-antiunify", ask="open") as service:
        await warm(service)
        assert purposes(service) == {"program": 3}
        hit = await service.chat(ask(3))
        assert (hit.cache["kind"], hit.text) == ("program", margin(3))
        assert (await shown(service))[0]["entry"]["made_by"] == "antiunify"


async def test_what_has_too_little_in_common_is_left_to_the_target() -> None:
    bare = [
        rule(f"Request: Sales {n},", f"```python\nanswer = {margin(at)}\n```")
        for at, (n, _) in enumerate(NUMBERS)
    ]
    async with cache(*entries(ENTRY), *bare, name="minicache-antiunify") as service:
        await warm(service)
        assert purposes(service)["generate"] == 1
        assert (await shown(service))[0]["entry"]["made_by"] == "target"


async def test_a_group_that_needs_two_programs_becomes_two() -> None:
    def other(at: int) -> dict[str, Any]:
        sales, costs = NUMBERS[at]
        return rule(f"Request: Sales {sales},", f"```python\na = {sales}\nb = {costs}\nanswer = a - b\n```")

    async with cache(other(2), other(3), *entries(BARE), nu=4, retries=1) as service:
        await warm(service, 4)
        (work,) = await service.background()
        assert work["details"]["outcome"] == "split"
        assert [group["exemplars"] for group in await shown(service)] == [
            [ask(0), ask(1)],
            [ask(2), ask(3)],
        ]


async def test_extraction_by_pattern() -> None:
    pattern = r"Sales (?P<sales>\d+), and costs (?P<costs>\d+)"
    reply = ENTRY.replace("def solve", f'PATTERN = r"{pattern}"\ndef solve')
    async with cache(*entries(reply), name="minicache-no-small-model") as service:
        await warm(service)
        hit = await service.chat(ask(3))
        assert (hit.cache["kind"], hit.text, hit.calls) == ("program", margin(3), [])
        other = await service.chat("What is the margin? Costs 45, and sales 60.")
        assert other.cache["kind"] == "miss"
        assert service.requests("small") == []


async def test_an_entry_whose_extractions_keep_failing_is_dropped() -> None:
    broken = rule(r"each variable.*Sales (640|200),", "nonsense")
    async with cache(broken, quarantine_after=2) as service:
        await warm(service)
        for at in (3, 4):
            assert (await service.chat(ask(at))).cache["kind"] == "miss"
        (group,) = await shown(service)
        assert "quarantined" in group["summaries"][-1]
        await service.background()
        assert (await service.chat(ask(5))).cache["key"] in ("group-0/2", "group-0")


async def test_a_shadowed_hit_that_is_not_the_target_s_drops_its_entry() -> None:
    async with cache(*entries(WRONG), validation=False, shadow_share=1.0, nu=3) as service:
        await warm(service)
        assert (await service.chat(ask(3))).text == "800.00"
        work = (await service.background())[-1]
        assert (work["name"], work["details"]["same"], work["details"]["target"]) == (
            "shadow",
            False,
            margin(3),
        )
        assert (await shown(service))[0]["entry"] is None
    async with cache(shadow_share=1.0) as service:
        await warm(service)
        await service.chat(ask(3))
        assert (await service.background())[-1]["details"]["same"] is True
        assert (await service.chat(ask(4))).cache["kind"] == "program"


async def test_wording_that_turns_a_request_round_is_refused() -> None:
    text = "Sales 640, and costs 160. What is the margin without costs?"
    async with cache(guard_wording=True) as service:
        await warm(service)
        answer = await service.chat(text)
        assert (
            answer.cache["kind"] == "miss"
            and "wording that no exemplar has: without" in answer.cache["reason"]
        )
    async with cache() as service:
        await warm(service)
        assert (await service.chat(text)).cache["kind"] == "program"


def framed(name: str, at: int) -> str:
    return f'Use formula {name} to answer the question. Formula: M = x. Question: "{ask(at)}". Answer:'


async def test_oracle_groups_follow_the_template_s_name() -> None:
    rules = [
        rule(f"Sales {sales},", one["reply"]) for (sales, _), one in zip(NUMBERS, programs(), strict=True)
    ]
    async with serving(
        "minicache-oracle-groups",
        rules=[REFLECT, *entries(ENTRY), *extractions(), *rules],
        task=FormulaTask(),
    ) as service:
        for at in range(4):
            await service.chat(framed("Gross Margin" if at % 2 else "Net Margin", at))
        groups = await shown(service)
        assert [len(group["exemplars"]) for group in groups] == [2, 2]
        assert [group["key"].partition("/")[2] for group in groups] == ["Net Margin", "Gross Margin"]


async def test_no_request_waits_for_a_generation_and_a_group_has_one_at_a_time() -> None:
    async with cache(*entries(ENTRY, delay_s=30.0)) as service:
        for at in range(len(NUMBERS)):
            answer = await service.chat(ask(at))
            assert answer.text == margin(at) and answer.cache["kind"] == "miss"
        await until(lambda: purposes(service)["generate"] == 1)
        assert (await service.get("/admin/background"))["running"] == 1
        await service.post({}, "/admin/reset")
        told = await service.get("/admin/background")
        assert told["running"] == 0
        assert [one["outcome"] for one in told["finished"]] == ["cancelled"]
        assert await service.events() == []


async def test_a_generation_that_the_engine_fails_is_tried_again() -> None:
    failing = rule("solved requests of one kind", "", fault="500", times=1)
    async with cache(failing, *entries(ENTRY)) as service:
        await warm(service)
        (work,) = await service.background()
        assert work["outcome"] == "error" and work["error"]["type"] == "http_500"
        (group,) = await shown(service)
        assert (group["state"], group["failed_triggers"], group["entries_attempted"]) == ("open", 0, 0)
        await service.chat(ask(3))
        await service.background()
        assert (await service.chat(ask(4))).cache["kind"] == "program"


async def test_conversations_and_tools_pass_by() -> None:
    async with cache() as service:
        await warm(service)
        user = {"role": "user", "content": ask(3)}
        before = await service.events()
        for body in (
            {"messages": [user, {"role": "assistant", "content": "5"}, user]},
            {"messages": [user], "response_format": {"type": "json_object"}},
        ):
            answer = await service.post({"model": "minicache", **body})
            assert answer.cache["kind"] == "miss" and answer.cache["reason"].startswith("bypassed")
        assert await service.events() == before


async def test_many_requests_at_once_lose_nothing_and_agree_with_one_after_the_other() -> None:
    texts = [f"Sales {1000 + n}, and costs {n}. What is the margin?" for n in range(200)]
    expected = {text: f"{1000 / (1000 + n) * 100:.2f}" for n, text in enumerate(texts)}
    rules = [
        rule(rf"each variable.*Sales {1000 + n},", json.dumps({"sales": str(1000 + n), "costs": str(n)}))
        for n in range(200)
    ] + [
        rule(
            rf"Request: Sales {1000 + n},",
            f"```python\nsales = {1000 + n}\ncosts = {n}\nanswer = (sales - costs) / sales * 100\n```",
        )
        for n in range(200)
    ]
    async with cache(*entries(ENTRY, delay_s=0.3), *rules) as service:
        turn = asyncio.Semaphore(16)
        answers: dict[int, Answer] = {}

        async def one(n: int) -> None:
            async with turn:
                answers[n] = await service.chat(texts[n % 200])

        await asyncio.gather(*(one(n) for n in range(5000)))
        work = await service.background()
        assert all(answer.text == expected[texts[n % 200]] for n, answer in answers.items())
        misses = sum(answer.cache["kind"] == "miss" for answer in answers.values())
        (group,) = [json.loads(json.dumps(event))["state"] for event in await service.events()]
        assert (group["seen"], group["hits"]) == (misses, 5000 - misses)
        assert 3 <= misses < 2500
        assert [one["details"]["outcome"] for one in work] == ["accepted"]


@pytest.mark.model
async def test_a_killed_service_restarts_warm(tmp_path: Path) -> None:
    from bench.config import EngineConfig
    from runners.chat import open_session, send_chat

    cell = Cell(method="minicache-antiunify", workload="formula")
    script = {"rules": [*entries(ENTRY), *extractions(), *programs()]}
    engine = MockEngine(EngineConfig(kind="mock", script=script), "target")
    endpoint = Endpoint(await engine.start(tmp_path), model="mock")
    state = tmp_path / "state.jsonl"
    service = ServiceProcess(cell, {"target": endpoint, "small": endpoint}, state, tmp_path / "log")
    try:
        async with open_session() as http:

            async def chat(at: int) -> Any:
                body = {"model": "m", "messages": [{"role": "user", "content": ask(at)}]}
                url = f"{service.url}/chat/completions"
                return await send_chat(http, url, body, headers={"x-reusebench-trace": "1"}, timeout_s=30)

            await service.start()
            for at in range(3):
                await chat(at)
            async with http.get(service.url.removesuffix("/v1") + "/admin/background?wait_s=20") as reply:
                assert (await reply.json())["running"] == 0
            await service.stop(at_once=True)
            with state.open("a", encoding="utf-8") as journal:
                journal.write('{"request": "torn')
            await service.start()
            calls = len(engine.requests)
            hit = await chat(3)
            assert hit.text == margin(3)
            assert hit.extra["reusebench"]["cache"]["kind"] == "program"
            assert len(engine.requests) == calls
    finally:
        await service.stop()
        await engine.stop()
