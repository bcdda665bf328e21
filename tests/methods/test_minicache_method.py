"""MiniCache as it is served: misses, generations beside the requests, hits, and what undoes an entry."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from bench.execution import ProgramResult
from bench.registry import workload
from runners.client import Endpoint
from tests.serving import (
    END,
    STREAM_HEAD,
    Answer,
    QuickExecutor,
    RawServer,
    Served,
    ask,
    chunk,
    delta,
    serving,
    sse,
    until,
)

FORMULA = workload("formula").task


def prompt(name: str) -> str:
    return (files("methods") / "prompts" / f"{name}.txt").read_text(encoding="utf-8").strip()


GENERATE, REFLECT = prompt("minicache_generate_system"), prompt("minicache_reflect_system")


class Kind:
    """Requests that ask for one computation, and what good engines reply to them."""

    def __init__(self, wording: str, names: tuple[str, str], formula: str) -> None:
        self.wording = wording
        self.names = names
        self.formula = formula
        escaped = re.escape(wording).replace(r"\{a\}", r"(?P<a>\d+)").replace(r"\{b\}", r"(?P<b>\d+)")
        self.pattern = re.compile(escaped)

    def request(self, a: int, b: int) -> str:
        return self.wording.format(a=a, b=b)

    def values(self, text: str) -> dict[str, str]:
        match = self.pattern.search(text)
        assert match is not None
        return dict(zip(self.names, match.groups(), strict=True))

    def program(self, text: str, formula: str | None = None) -> str:
        lines = [f"{name} = {value}" for name, value in self.values(text).items()]
        return "```python\n" + "\n".join([*lines, f"answer = {formula or self.formula}"]) + "\n```"

    def entry(self, formula: str | None = None, before: str = "") -> str:
        arguments = ", ".join(f"{name}: float" for name in self.names)
        return f"```python\n{before}def solve({arguments}):\n    return {formula or self.formula}\n```"

    def answer(self, a: int, b: int) -> str:
        return f"{eval(self.formula, dict(zip(self.names, (a, b), strict=True))):.2f}"


SHARE = Kind(
    "A fund holds {a} units out of a total of {b}; which share in percent is that?",
    ("held", "total"),
    "held / total * 100",
)
FEES = Kind(
    "The broker charges {a} for every lot, and {b} lots change hands: say what she earns.",
    ("charge", "lots"),
    "charge * lots",
)
KINDS = (SHARE, FEES)


def purpose_of(body: Mapping[str, Any]) -> str:
    system = str(body["messages"][0]["content"])
    if "response_format" in body:
        return "extract"
    for purpose, text in (("generate", GENERATE), ("reflect", REFLECT)):
        if system.startswith(text):
            return purpose
    return "program" if "Reply with the Python program only" in body["messages"][-1]["content"] else "answer"


def play(body: Mapping[str, Any], kinds: Sequence[Kind] = KINDS) -> str:
    """Reply as a pair of models that makes no mistake."""
    text = str(body["messages"][-1]["content"])
    purpose = purpose_of(body)
    if purpose in ("reflect", "answer"):
        return "Mind the total."
    kind = next(kind for kind in kinds if kind.pattern.search(text))
    if purpose == "extract":
        return json.dumps(kind.values(text))
    return kind.program(text) if purpose == "program" else kind.entry()


Reply = Callable[[Mapping[str, Any]], str | None]
"""What an engine says to a request; None is a failure of the engine."""


class Pair:
    """Two engines that :func:`play`, unless the test says otherwise for one purpose.

    Attributes:
        own: Replies by purpose.
        gates: Requests of these purposes wait for the event.
        asked: The purposes, in order of arrival.
    """

    def __init__(self, **own: Reply) -> None:
        self.own = own
        self.gates: dict[str, asyncio.Event] = {}
        self.asked: list[str] = []
        self.target, self.small = RawServer(self._answer), RawServer(self._answer)

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        purpose = purpose_of(body)
        self.asked.append(purpose)
        if purpose in self.gates:
            await self.gates[purpose].wait()
        text = self.own.get(purpose, play)(body)
        if text is None:
            writer.write(b"HTTP/1.1 500 Bad\r\nContent-Length: 2\r\n\r\nno")
        else:
            writer.write(STREAM_HEAD + chunk(sse(delta("stop", content=text), "[DONE]")) + END)

    async def __aenter__(self) -> Pair:
        await self.target.__aenter__()
        await self.small.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for gate in self.gates.values():
            gate.set()
        await self.target.__aexit__()
        await self.small.__aexit__()

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        return {
            role: Endpoint(server.url, model=role, timeout_s=20)
            for role, server in (("target", self.target), ("small", self.small))
        }

    def prompts(self, purpose: str) -> list[str]:
        """The user's side of what was asked with a purpose."""
        bodies = [*self.target.bodies, *self.small.bodies]
        return [str(body["messages"][-1]["content"]) for body in bodies if purpose_of(body) == purpose]


@asynccontextmanager
async def minicache(
    pair: Pair, name: str = "minicache", executor: Any = None, **config: Any
) -> AsyncIterator[Served]:
    """With a small model that is asked even what can have a single answer, so that it can be watched."""
    config = {"ask": "always", **config}
    async with serving(name, task=FORMULA, config=config, executor=executor) as service, pair:
        service.service.endpoints = pair.endpoints
        yield service


async def asked(service: Served, kind: Kind, *pairs: tuple[int, int], **body: Any) -> list[Answer]:
    """Ask one after the other, and let no generation be in the way of the next."""
    answers = []
    for a, b in pairs:
        answers.append(await service.chat(kind.request(a, b), **body))
        await service.background()
    assert all(answer.ok for answer in answers)
    return answers


async def group(service: Served, number: int = 0) -> dict[str, Any]:
    shown: dict[str, Any] = (await service.get("/admin/cache"))["state"]["groups"][number]
    return shown


def purposes(answer: Answer) -> list[str]:
    return [call["purpose"] for call in answer.calls]


WARM = ((20, 80), (45, 90), (12, 60))


async def test_misses_become_a_program_that_answers_without_the_target() -> None:
    pair = Pair()
    async with minicache(pair) as service:
        misses = await asked(service, SHARE, *WARM)
        assert [one.text for one in misses] == [SHARE.answer(*values) for values in WARM]
        assert [one.cache["kind"] for one in misses] == ["miss"] * 3
        assert misses[0].cache["reason"].startswith("no group at cosine")
        assert {one.cache["reason"] for one in misses[1:]} == {"the group has no entry yet"}
        assert [one.details["group"] for one in misses] == [0, 0, 0]
        assert [one.details["route"]["new"] for one in misses] == [True, False, False]
        (work,) = await service.background()
        assert (work["name"], work["outcome"], work["details"]["outcome"]) == ("generate", "ok", "accepted")
        assert [call["purpose"] for call in work["calls"]] == ["generate", *["validate"] * 3]
        assert work["details"]["attempts"][0]["passed"] == [True] * 3

        before = len(pair.target.bodies)
        for stream in (False, True):
            hit = await service.chat(SHARE.request(33, 44), stream=stream)
            assert (hit.text, hit.finish, hit.cache["kind"]) == ("75.00", "stop", "program")
            assert (hit.cache["key"], hit.cache["similarity"]) == ("group-0/1", pytest.approx(1))
            assert purposes(hit) == ["extract"]
            assert hit.details["values"] == {"held": 33, "total": 44}
            stages = [name for name, *_ in hit.extension["stages"]]
            assert stages == ["embed", "route", "extract", "roles", "execute"]
        assert len(pair.target.bodies) == before

        (other,) = await asked(service, FEES, (3, 5))
        assert other.cache["reason"].startswith("no group") and other.details["group"] == 1
        shown = await group(service)
        assert shown["state"] == "cached" and shown["hits"] == 2 and shown["requests"] == 5
        assert shown["exemplars"] == [SHARE.request(*values) for values in WARM]
        assert "def solve" in shown["entry"]["code"]
        stats = (await service.get("/admin/stats"))["state"]
        assert (stats["groups"], stats["entries"], stats["hits"], stats["exemplars"]) == (2, 1, 2, 4)
        assert (stats["attempted"], stats["accepted"], stats["generating"]) == (1, 1, 0)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("the share", "no JSON"),
        ('{"held": "33"}', "total is missing"),
        ('{"held": "33", "total": "45"}', "'45' is not in the request"),
        ('{"held": "33", "total": "33"}', "both '33'"),
    ],
)
async def test_a_refused_extraction_is_a_miss_that_says_why(said: str, reason: str) -> None:
    pair = Pair()
    async with minicache(pair, choices="all") as service:
        await asked(service, SHARE, *WARM)
        pair.own["extract"] = lambda body: said
        (miss,) = await asked(service, SHARE, (33, 44))
        assert (miss.text, miss.cache["kind"]) == ("75.00", "miss")
        assert miss.cache["reason"].startswith("refused: ") and reason in miss.cache["reason"]
        assert purposes(miss) == ["extract", "program"]
        assert miss.details["refused"] in miss.cache["reason"] and miss.details["entry"] == "group-0/1"
        shown = await group(service)
        assert (shown["refused"], shown["hits"], len(shown["exemplars"])) == (1, 0, 4)
        assert shown["state"] == "cached"


async def test_a_request_with_too_few_values_is_refused_before_anything_is_asked() -> None:
    pair = Pair()
    async with minicache(pair) as service:
        await asked(service, SHARE, *WARM)
        pair.own["program"] = lambda body: "```python\nanswer = 5\n```"
        one = await service.chat(SHARE.request(33, 44).replace("44", "some units"))
        assert "2 numbers wanted, 1 in the request" in one.cache["reason"]
        assert purposes(one) == ["program"] and one.text == "5.00"


async def test_an_extraction_that_was_cut_off_is_refused() -> None:
    rules = [
        {"match": "holds 33 .*program only", "reply": SHARE.program(SHARE.request(33, 44))},
        {"reply": json.dumps({"held": "33", "total": "44"}), "finish_reason": "length"},
    ]
    async with (
        minicache(Pair()) as service,
        serving("minicache", task=FORMULA, rules=rules, config={"ask": "always"}) as cut,
    ):
        await asked(service, SHARE, *WARM)
        put = {"method": "minicache", "events": await service.events()}
        assert (await cut.post(put, "/admin/cache", "PUT")).status == 200
        answer = await cut.chat(SHARE.request(33, 44))
        assert answer.text == "75.00" and "cut off" in answer.cache["reason"]


async def test_where_words_are_unclear_the_small_model_and_they_must_agree() -> None:
    pair = Pair()
    async with minicache(pair, margin=9) as service:  # nothing is ever clear
        await asked(service, SHARE, *WARM)
        hit = await service.chat(SHARE.request(33, 44))
        assert (hit.cache["kind"], hit.details["choices"]) == ("program", "some")
        pair.own["extract"] = lambda body: '{"held": "44", "total": "33"}'
        miss = await service.chat(SHARE.request(33, 44))
        assert miss.text == "75.00" and "fits better" in miss.cache["reason"]


async def test_a_refused_request_teaches_how_its_values_are_called() -> None:
    pair = Pair()
    swapped = '{"held": "44", "total": "33"}'
    async with minicache(pair, margin=9) as service:
        await asked(service, SHARE, *WARM)
        pair.own["extract"] = lambda body: swapped
        text = SHARE.request(33, 44)
        await service.chat(text)
        work = (await service.background())[-1]
        assert (work["name"], work["details"]["learned"]) == ("learn", {"held": "33", "total": "44"})
        assert work["calls"] == [] and (await group(service))["state"] == "cached"
        assert (await group(service))["entry"]["shots"][-1] == [text, {"held": "33", "total": "44"}]
        # What the target took for the values must be what the encoder takes for them, too.
        pair.own["program"] = lambda body: "```python\nanswer = 60 / 45 * 100\n```"
        await service.chat(SHARE.request(45, 60))
        work = (await service.background())[-1]
        assert work["details"]["learned"] is None and "best guess" in work["details"]["why"]
        pair.own["program"] = lambda body: "```python\nanswer = 1\n```"
        await service.chat(SHARE.request(21, 77))
        work = (await service.background())[-1]
        assert work["details"]["learned"] is None and "no choice" in work["details"]["why"]
        assert len((await group(service))["entry"]["shots"]) == len(WARM) + 1
    async with minicache(pair, margin=9, learn=False) as service:
        pair.own = {}
        await asked(service, SHARE, *WARM)
        pair.own["extract"] = lambda body: swapped
        await service.chat(SHARE.request(33, 44))
        assert {work["name"] for work in await service.background()} == {"generate"}


async def test_an_exemplar_that_fails_teaches_nothing() -> None:
    """Two values swapped by the target give an answer that the entry can give, too."""
    pair = Pair()
    pair.own["program"] = lambda body: (
        SHARE.program(body["messages"][-1]["content"], "total / held * 100")
        if "51" in body["messages"][-1]["content"]
        else play(body)
    )
    async with minicache(pair) as service:
        await asked(service, SHARE, (20, 80), (51, 60), (12, 48))
        assert (await group(service))["state"] == "cached"
        shots = (await group(service))["entry"]["shots"]
        assert [request for request, _ in shots] == [SHARE.request(20, 80), SHARE.request(12, 48)]


async def test_a_program_that_fails_on_a_hit_is_a_miss() -> None:
    pair = Pair()
    async with minicache(pair) as service:
        await asked(service, SHARE, *WARM)
        pair.own["program"] = lambda body: "```python\nanswer = 0\n```"
        miss = await service.chat(SHARE.request(7, 0))
        assert (miss.text, miss.cache["kind"]) == ("0.00", "miss")
        assert "ZeroDivisionError" in miss.cache["reason"]


# Generations


async def test_a_failure_is_reflected_on_and_the_next_attempt_is_told() -> None:
    wrong = iter([SHARE.entry("held + total"), SHARE.entry()])
    pair = Pair(generate=lambda body: next(wrong), reflect=lambda body: "Divide them.")
    async with minicache(pair) as service:
        await asked(service, SHARE, *WARM)
        (work,) = await service.background()
        assert (work["details"]["outcome"], work["details"]["attempted"]) == ("accepted", 2)
        first, second = work["details"]["attempts"]
        assert first["summary"] == "Divide them." and not all(first["passed"]) and all(second["passed"])
        assert "Divide them." not in pair.prompts("generate")[0]
        assert "Divide them." in pair.prompts("generate")[1]
        assert "held + total" in pair.prompts("reflect")[0]
        assert "no choice of its values gives its answer" in pair.prompts("reflect")[0]
        shown = await group(service)
        assert (shown["entries_attempted"], shown["entries_accepted"]) == (2, 1)
        assert shown["summaries"] == ["Divide them."]


async def test_without_reflection_nothing_is_summarised() -> None:
    wrong = iter([SHARE.entry("held + total"), SHARE.entry()])
    pair = Pair(generate=lambda body: next(wrong))
    async with minicache(pair, "minicache-no-reflection") as service:
        await asked(service, SHARE, *WARM)
        assert pair.asked.count("generate") == 2 and "reflect" not in pair.asked
        assert (await group(service))["state"] == "cached"


async def test_without_validation_whatever_was_written_is_installed() -> None:
    pair = Pair(generate=lambda body: SHARE.entry("held + total"))
    async with minicache(pair, "minicache-no-validation") as service:
        await asked(service, SHARE, *WARM)
        hit = await service.chat(SHARE.request(33, 44))
        assert (hit.cache["kind"], hit.text) == ("program", "77.00")
        assert "extract" not in pair.asked[:-1]


async def test_an_entry_needs_alpha_of_its_exemplars() -> None:
    for odd, state in ((1, "cached"), (2, "open")):
        strange = [SHARE.request(*values) for values in WARM[:odd]]

        def program(body: Mapping[str, Any], strange: list[str] = strange) -> str:
            text = body["messages"][-1]["content"]
            formula = "held * total / 7 + 1" if any(one in text for one in strange) else None
            return SHARE.program(text, formula)

        async with minicache(Pair(program=program), split=False) as service:
            await asked(service, SHARE, *WARM)
            assert (await group(service))["state"] == state


@pytest.mark.parametrize(("name", "due"), [("minicache", [3, 6, 12]), ("minicache-no-backoff", [3, 4, 5])])
async def test_failed_triggers_back_off_until_the_group_is_uncacheable(name: str, due: list[int]) -> None:
    pair = Pair(generate=lambda body: "No function comes to mind.")
    async with minicache(pair, name, retries=1) as service:
        triggered = []
        for a in range(1, 16):
            before = pair.asked.count("generate")
            (miss,) = await asked(service, SHARE, (a, 20 * a + 1))
            triggered += [a] * (pair.asked.count("generate") - before)
            assert miss.cache["kind"] == "miss"
        assert triggered == due
        assert miss.cache["reason"] == "the group is uncacheable"
        shown = await group(service)
        assert (shown["state"], shown["failed_triggers"]) == ("uncacheable", 3)
        outcomes = [work["details"]["outcome"] for work in await service.background()]
        assert outcomes == ["rejected", "rejected", "uncacheable"]


async def test_summaries_last_until_the_next_trigger() -> None:
    pair = Pair(generate=lambda body: SHARE.entry("held + total"), reflect=lambda body: "Divide them.")
    async with minicache(pair, retries=2, nu=2, split=False) as service:
        await asked(service, SHARE, *WARM[:2])
        assert "Divide them." not in pair.prompts("generate")[0]
        pair.own.clear()
        await asked(service, SHARE, WARM[2], (5, 50))
        assert pair.prompts("generate")[-1].count("Divide them.") == 1
        assert (await group(service))["state"] == "cached"


async def test_an_engine_that_fails_is_no_failed_trigger() -> None:
    pair = Pair(generate=lambda body: None)
    async with minicache(pair) as service:
        await asked(service, SHARE, *WARM)
        (work,) = await service.background()
        assert work["outcome"] == "error" and work["error"]["message"] and work["calls"][0]["error"]
        shown = await group(service)
        assert (shown["state"], shown["trigger"], shown["failed_triggers"]) == ("open", 3, 0)
        pair.own.clear()
        await asked(service, SHARE, (9, 36))
        assert (await group(service))["state"] == "cached"
        assert [work["outcome"] for work in await service.background()] == ["error", "ok"]


class Fragile(QuickExecutor):
    """An executor that can break."""

    broken = False

    async def run(self, code: str, *, arguments: dict[str, object] | None = None) -> ProgramResult:
        if self.broken:
            return ProgramResult("executor_error", None, "", "no zygote", 1)
        return await super().run(code, arguments=arguments)


async def test_an_executor_or_small_engine_that_fails_on_a_hit_is_an_error_that_leaves_nothing() -> None:
    pair, executor = Pair(), Fragile()
    async with minicache(pair, executor=executor) as service:
        await asked(service, SHARE, *WARM)
        before = await service.events()
        executor.broken = True
        assert (await service.chat(SHARE.request(33, 44))).status == 500
        executor.broken = False
        pair.own["extract"] = lambda body: None
        assert (await service.chat(SHARE.request(33, 44))).status == 502
        assert await service.events() == before
        pair.own.clear()
        assert (await service.chat(SHARE.request(33, 44))).cache["kind"] == "program"


async def test_an_executor_that_fails_in_a_generation_is_no_verdict_on_the_entry() -> None:
    pair, executor = Pair(), Fragile()
    pair.gates["generate"] = asyncio.Event()
    async with minicache(pair, executor=executor) as service:
        for values in WARM:
            assert (await service.chat(SHARE.request(*values))).ok
        await until(lambda: "generate" in pair.asked)
        executor.broken = True
        pair.gates["generate"].set()
        (work,) = await service.background()
        assert (work["outcome"], work["error"]["type"]) == ("error", "ExecutorFailed")
        assert (await group(service))["failed_triggers"] == 0


async def test_no_request_waits_for_a_generation_and_a_group_has_one_at_a_time() -> None:
    pair = Pair()
    pair.gates["generate"] = asyncio.Event()
    async with minicache(pair) as service:
        for a in range(1, 7):
            miss = await service.chat(SHARE.request(a, 50))
            assert (miss.text, miss.cache["kind"]) == (SHARE.answer(a, 50), "miss")
        for a in range(1, 5):
            assert (await service.chat(FEES.request(a, 60))).text == FEES.answer(a, 60)
        await until(lambda: "generate" in pair.asked)
        assert pair.asked.count("generate") == 1  # the second group waits for its turn
        stats = (await service.get("/admin/stats"))["state"]
        assert (stats["generating"], stats["entries"], stats["exemplars"]) == (2, 0, 10)
        assert (await service.get("/admin/background"))["running"] == 2
        pair.gates["generate"].set()
        works = await service.background()
        assert [work["details"]["group"] for work in works] == [0, 1]
        assert pair.asked.count("generate") == 2
        for kind in KINDS:
            hit = await service.chat(kind.request(8, 64))
            assert (hit.cache["kind"], hit.text) == ("program", kind.answer(8, 64))


async def test_groups_generate_side_by_side_where_that_is_allowed() -> None:
    pair = Pair()
    pair.gates["generate"] = asyncio.Event()
    async with minicache(pair, parallel_generations=2) as service:
        for kind in KINDS:
            for values in WARM:
                await service.chat(kind.request(*values))
        await until(lambda: pair.asked.count("generate") == 2)
        pair.gates["generate"].set()
        assert len(await service.background()) == 2


async def test_a_reset_ends_what_is_under_way() -> None:
    pair = Pair()
    pair.gates["generate"] = asyncio.Event()
    async with minicache(pair) as service:
        for kind in KINDS:
            for values in WARM:
                await service.chat(kind.request(*values))
        await until(lambda: "generate" in pair.asked)
        assert (await service.post({}, "/admin/reset")).status == 200
        works = await service.background()
        assert [work["outcome"] for work in works] == ["cancelled"] * 2
        pair.gates["generate"].set()
        assert await service.events() == []
        (miss,) = await asked(service, SHARE, (1, 2))
        assert miss.details["group"] == 0 and (await group(service))["state"] == "open"
        await asked(service, SHARE, *WARM)  # and a generation is tried again
        assert (await group(service))["state"] == "cached"


def odd_ones_differ(body: Mapping[str, Any]) -> str:
    """One wording that stands for two computations."""
    text = body["messages"][-1]["content"]
    return SHARE.program(text, "total - held" if int(SHARE.values(text)["held"]) % 2 else None)


async def test_a_group_that_needs_two_programs_becomes_two() -> None:
    pair = Pair(program=odd_ones_differ)
    async with minicache(pair, nu=4, retries=1) as service:
        await asked(service, SHARE, (20, 80), (45, 90), (12, 60), (7, 70))
        (work,) = await service.background()
        assert work["details"]["outcome"] == "split"
        first, second = await group(service, 0), await group(service, 1)
        assert first["exemplars"] == [SHARE.request(20, 80), SHARE.request(12, 60)]
        assert second["exemplars"] == [SHARE.request(45, 90), SHARE.request(7, 70)]
    async with minicache(Pair(program=odd_ones_differ), nu=4, retries=1, split=False) as service:
        await asked(service, SHARE, (20, 80), (45, 90), (12, 60), (7, 70))
        assert (await service.get("/admin/stats"))["state"]["groups"] == 1


async def test_another_groups_first_attempt_goes_before_a_second_one() -> None:
    failed: list[str] = []

    def generate(body: Mapping[str, Any]) -> str:
        text = str(body["messages"][-1]["content"])
        if SHARE.pattern.search(text) and not failed:
            failed.append(text)
            return "None."
        return play(body)

    pair = Pair(generate=generate)
    pair.gates["generate"] = asyncio.Event()
    async with minicache(pair, nu=3) as service:
        for a, b in WARM:
            await service.chat(SHARE.request(a, b))
            await service.chat(FEES.request(a, b))
        pair.gates["generate"].set()
        works = await service.background()
        assert [work["details"]["outcome"] for work in works] == ["accepted", "accepted"]
        assert ["lots" in prompt for prompt in pair.prompts("generate")] == [False, True, False]
        order = [purpose for purpose in pair.asked if purpose in ("generate", "reflect")]
        assert order == ["generate", "generate", "reflect", "generate"]
        assert works[1]["details"]["attempts"][0]["summary"] == "Mind the total."


async def test_a_split_takes_the_exemplars_of_its_own_time() -> None:
    """Some went, and others came, while the entry was written."""
    pair = Pair(program=odd_ones_differ, generate=lambda body: "None.")
    pair.gates["generate"] = asyncio.Event()
    async with minicache(pair, nu=4, max_exemplars=4, retries=1) as service:
        for a in (1, 2, 3, 4, 6, 8, 7):
            await service.chat(SHARE.request(a, 60))
        pair.gates["generate"].set()
        await service.background()
        shown = await group(service)
        assert shown["exemplars"] == [SHARE.request(a, 60) for a in (4, 6, 8, 7)]
        assert shown["failed_triggers"] == 1  # only one odd one is left: there is nothing to split


async def test_a_group_that_keeps_mixing_requests_is_not_split_for_ever() -> None:
    pair = Pair(program=odd_ones_differ, generate=lambda body: "None.")
    for name, groups in (("minicache", 3), ("minicache-oracle-groups", 1)):
        async with minicache(pair, name, nu=4, beta=1, retries=1) as service:
            for a in (1, 3, *range(2, 60, 2)):
                text = SHARE.request(a, 90)
                if name == "minicache-oracle-groups":
                    text = FRAMED.format(name="Share", text=text)
                assert (await service.chat(text)).ok
                await service.background()
            stats = (await service.get("/admin/stats"))["state"]
            assert stats["groups"] == groups
            assert (await group(service))["state"] == "uncacheable"


async def test_a_reset_while_a_hit_is_under_way_leaves_an_empty_state(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    for said, kind in ((None, "program"), ("{}", "miss")):
        pair = Pair()
        always = {"ask": "always"}
        async with serving("minicache", task=FORMULA, state=state, config=always) as service, pair:
            service.service.endpoints = pair.endpoints
            await asked(service, SHARE, *WARM)
            pair.gates["extract"] = asyncio.Event()
            if said is not None:
                pair.own["extract"] = lambda body, said=said: said
            under_way = asyncio.create_task(service.chat(SHARE.request(33, 44)))
            before = len(pair.small.bodies)
            await until(lambda: len(pair.small.bodies) > before)
            await service.post({}, "/admin/reset")
            pair.gates["extract"].set()
            answer = await under_way
            assert (answer.text, answer.cache["kind"]) == ("75.00", kind)
            left = await service.events()
            assert [event["state"]["refused"] for event in left] == ([] if said is None else [0])
        async with serving("minicache", task=FORMULA, state=state) as again:
            assert await again.events() == left
            await again.post({}, "/admin/reset")


# Variants


async def test_programs_that_agree_need_no_target_and_clear_words_no_small_model() -> None:
    pair = Pair()
    async with minicache(pair, "minicache-antiunify", ask="open") as service:
        await asked(service, SHARE, *WARM)
        assert pair.asked == ["program"] * 3
        hit = await service.chat(SHARE.request(33, 44))
        assert (hit.text, hit.cache["kind"], hit.details["choices"]) == ("75.00", "program", "one")
        assert hit.calls == [] and pair.asked == ["program"] * 3
        assert (await group(service))["entry"]["made_by"] == "antiunify"
    unclear = Pair()
    async with minicache(unclear, "minicache-antiunify", ask="open", margin=9) as service:
        await asked(service, SHARE, *WARM)
        hit = await service.chat(SHARE.request(33, 44))
        assert purposes(hit) == ["extract"] and hit.details["choices"] == "some"


async def test_where_programs_have_nothing_in_common_the_target_is_asked() -> None:
    def program(body: Mapping[str, Any]) -> str:
        text = body["messages"][-1]["content"]
        values = SHARE.values(text)
        return f"```python\nfor _ in [1]:\n    answer = {values['held']} / {values['total']} * 100\n```"

    pair = Pair(program=program)
    async with minicache(pair, "minicache-antiunify") as service:
        await asked(service, SHARE, *WARM)
        assert pair.asked.count("generate") == 1
        assert (await group(service))["entry"]["made_by"] == "target"


async def test_a_pattern_takes_the_place_of_the_small_model() -> None:
    before = 'PATTERN = r"holds (?P<held>\\d+) units out of a total of (?P<total>\\d+)"\n'
    pair = Pair(generate=lambda body: SHARE.entry(before=before))
    async with minicache(pair, "minicache-no-small-model", tau=0.5) as service:
        await asked(service, SHARE, *WARM)
        assert "PATTERN" in pair.target.bodies[-1]["messages"][0]["content"]
        hit = await service.chat(SHARE.request(33, 44))
        assert (hit.text, hit.cache["kind"], hit.calls) == ("75.00", "program", [])
        assert pair.small.bodies == []
        pair.own["program"] = lambda body: "```python\nanswer = 75\n```"
        miss = await service.chat("A fund holds 33 units, and 44 in all; which share in percent is that?")
        assert miss.text == "75.00" and "pattern does not match" in miss.cache["reason"]


FRAMED = 'Use formula {name} to answer the question. Formula: S = H / T, Question: "{text}" Answer:'


async def test_groups_by_template_follow_the_name_alone() -> None:
    pair = Pair()
    async with minicache(pair, "minicache-oracle-groups") as service:
        for name, text, number, new in (
            ("Share", SHARE.request(20, 80), 0, True),
            ("Share", FEES.request(4, 5), 0, False),
            ("Quota", SHARE.request(20, 80), 1, True),
            ("Quota", SHARE.request(30, 90), 1, False),
        ):
            answer = await service.chat(FRAMED.format(name=name, text=text))
            assert (answer.details["group"], answer.details["route"]["new"]) == (number, new)
        assert (await group(service))["key"].endswith("/Share")


async def test_models_and_system_prompts_have_groups_of_their_own() -> None:
    pair = Pair()
    async with minicache(pair) as service:
        await asked(service, SHARE, *WARM)
        user = ask(SHARE.request(33, 44))["messages"]
        french = [{"role": "system", "content": "Answer in French."}, *user]
        for body, number in (({"model": "other"}, 1), ({"messages": french}, 2)):
            answer = await service.post({"model": "m", "messages": user, **body})
            assert (answer.cache["kind"], answer.details["group"]) == ("miss", number)
        assert (await service.chat(SHARE.request(33, 44))).cache["kind"] == "program"


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
        {"response_format": {"type": "json_object"}},
        {
            "messages": [
                {"role": "user", "content": "Hello."},
                {"role": "assistant", "content": "Hello."},
                *ask(SHARE.request(33, 44))["messages"],
            ]
        },
    ],
    ids=["tools", "format", "conversation"],
)
async def test_what_is_more_than_one_text_passes_by(body: dict[str, Any]) -> None:
    pair = Pair()
    async with minicache(pair) as service:
        await asked(service, SHARE, *WARM)
        before = await service.events()
        answer = await service.post({**ask(SHARE.request(33, 44)), **body})
        assert answer.ok and answer.cache["kind"] == "miss" and "bypassed" in answer.cache["reason"]
        assert await service.events() == before
        assert service.method.stats()["bypassed"] == 1


async def test_a_direct_answer_is_an_exemplar_without_a_program() -> None:
    pair = Pair(program=lambda body: "None comes to mind.", answer=lambda body: "About 25.")
    async with minicache(pair, nu=1, retries=1) as service:
        await asked(service, SHARE, (20, 80))
        assert "Answer 1: About 25." in pair.prompts("generate")[0]
        assert (await group(service))["state"] == "cached"  # 20 of 80 is 25


# Guardrails


async def test_refusals_in_a_row_quarantine_an_entry() -> None:
    pair = Pair()
    async with minicache(pair, quarantine_after=2, nu=6) as service:
        await asked(service, SHARE, *((a, 90) for a in range(1, 7)))

        async def chat(*, good: bool) -> str:
            pair.own = {} if good else {"extract": lambda body: "{}"}
            return str((await service.chat(SHARE.request(33, 44))).cache["kind"])

        pair.gates["generate"] = asyncio.Event()
        assert [await chat(good=good) for good in (False, True, False)] == ["miss", "program", "miss"]
        assert (await group(service))["state"] == "cached"
        assert await chat(good=False) == "miss"
        shown = await group(service)
        assert shown["state"] == "open" and shown["summaries"][-1].startswith("quarantined: refused: ")
        pair.own.clear()
        pair.gates["generate"].set()
        await service.background()
        assert "quarantined" in pair.prompts("generate")[-1]
        shown = await group(service)
        assert (shown["state"], shown["entry"]["id"]) == ("cached", "group-0/2")


async def test_a_shadowed_hit_that_is_not_the_target_s_costs_the_entry() -> None:
    pair = Pair()
    async with minicache(pair, shadow_share=1) as service:
        await asked(service, SHARE, *WARM)
        hit, _ = await asked(service, SHARE, (33, 44), (10, 40))
        assert purposes(hit) == ["extract"]
        shadows = [work for work in await service.background() if work["name"] == "shadow"]
        assert [work["details"]["same"] for work in shadows] == [True, True]
        assert [call["purpose"] for call in shadows[0]["calls"]] == ["program"]
        assert (await group(service))["state"] == "cached"
        pair.own["program"] = lambda body: "```python\nanswer = 7\n```"
        (wrong,) = await asked(service, SHARE, (11, 44))
        assert (wrong.text, wrong.cache["kind"]) == ("25.00", "program")
        shadow = (await service.background())[-1]
        assert (shadow["details"]["same"], shadow["details"]["target"]) == (False, "7.00")
        shown = await group(service)
        assert shown["state"] == "open" and "shadowed" in shown["summaries"][-1]
    quiet = Pair()
    async with minicache(quiet, shadow_share=0) as service:
        await asked(service, SHARE, *WARM, (33, 44))
        assert [work["name"] for work in await service.background()] == ["generate"]


async def test_a_negation_that_no_exemplar_has_is_refused() -> None:
    unlike = f"{SHARE.request(33, 44)} Do not count cash."
    for guarded, kind in ((True, "miss"), (False, "program")):
        async with minicache(Pair(), guard_wording=guarded, tau=0.5) as service:
            await asked(service, SHARE, *WARM)
            assert (await service.chat(SHARE.request(33, 44))).cache["kind"] == "program"
            answer = await service.chat(unlike)
            assert answer.cache["kind"] == kind
            assert ("wording that no exemplar has: not" in answer.cache["reason"]) is guarded
