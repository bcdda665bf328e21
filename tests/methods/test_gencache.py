"""GenCache end to end, on mock engines, and with the real target on template-like requests."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from bench.workload import GenericTask
from methods.gencache import GenCache, _shared_beginning, _skeleton
from tests.serving import Served, serving, until

ITEMS = [
    "red cotton shirt",
    "blue wool scarf",
    "green linen dress",
    "black leather belt",
    "white silk tie",
    "grey cap",
]
REQUESTS = json.loads((Path(__file__).parent / "shopping_requests.json").read_text(encoding="utf-8"))


def ask(at: int) -> str:
    return f"i need a {ITEMS[at % len(ITEMS)]}, and price lower than {10 + at}.00 dollars"


def action(at: int) -> str:
    return f'Search({{"keywords": "{ITEMS[at % len(ITEMS)]}", "max_price": "{10 + at}"}})'


PROGRAM = r"""```python
import re
PATTERN = r"i need an? (?P<item>.+?), and price lower than (?P<price>\d+)\.00 dollars"
def solve(request):
    match = re.search(PATTERN, request)
    if match is None:
        return None
    return 'Search({"keywords": "' + match["item"] + '", "max_price": "' + match["price"] + '"})'
```"""
USELESS = PROGRAM.replace('match["price"] + \'"})\'', '"7" + \'"})\'')
NEVER = "```python\nPATTERN = r'buy (?P<x>.+)'\ndef solve(request):\n    return 'x'\n```"


def rule(match: str, reply: str, **more: Any) -> dict[str, Any]:
    return {"match": match, "reply": reply, **more}


def writes(*replies: str, **more: Any) -> list[dict[str, Any]]:
    mark = "find the pattern behind requests"
    first = [rule(mark, reply, times=1, **more) for reply in replies[:-1]]
    return [*first, rule(mark, replies[-1], **more)]


def judges(*verdicts: list[int], reason: str = "") -> list[dict[str, Any]]:
    mark = "A program answered requests"
    replies = [json.dumps({"verdicts": one, "reason": reason}) for one in verdicts]
    return [*(rule(mark, one, times=1) for one in replies[:-1]), rule(mark, replies[-1])]


ANSWERS = [
    rule(f"i need a {ITEMS[at % len(ITEMS)]}, and price lower than {10 + at}", action(at)) for at in range(40)
]


def cache(
    *rules: dict[str, Any], name: str = "gencache", **config: Any
) -> AbstractAsyncContextManager[Served]:
    everything = [*rules, *writes(PROGRAM), *judges([1] * 4), *ANSWERS]
    # The tests' encoder knows letters, not meaning: like requests are not as near for it as for a real one.
    settings = {"request_threshold": 0.5, "response_threshold": 0.5, **config}
    return serving(name, rules=everything, task=GenericTask(), config=settings)


async def shown(service: Served) -> list[dict[str, Any]]:
    return (await service.get("/admin/cache"))["state"]["clusters"]


async def warm(service: Served, n: int = 4) -> None:
    for at in range(n):
        assert (await service.chat(ask(at))).text == action(at)
    await service.background()


def calls(service: Served) -> Counter[str]:
    marks = {"find the pattern": "generate", "A program answered": "validate"}
    texts = [str(request["messages"][0]["content"]) for request in service.requests()]
    return Counter(next((name for mark, name in marks.items() if mark in text), "answer") for text in texts)


async def test_four_exemplars_make_a_program_and_the_fifth_request_is_a_hit() -> None:
    async with cache() as service:
        await warm(service)
        before = len(service.requests())
        hit = await service.chat(ask(4))
        assert (hit.cache["kind"], hit.cache["key"], hit.text) == ("program", "cluster-0", action(4))
        assert hit.calls == [] and len(service.requests()) == before
        assert hit.extension["details"]["lookup"] == "matched"
        (work,) = await service.background()
        assert (work["name"], work["details"]["outcome"]) == ("generate", "accepted")
        assert (work["details"]["attempted"], work["details"]["accepted"]) == (1, 1)
        assert [call["purpose"] for call in work["calls"]] == ["generate", "validate"]
        (cluster,) = await shown(service)
        assert (cluster["hits"], len(cluster["exemplars"])) == (1, 4)
        assert "PATTERN" in cluster["entry"]["code"]
        prompt = next(r["messages"][1]["content"] for r in service.requests() if "find the pattern" in str(r))
        assert f"Request 4: {ask(3)}" in prompt and f"Response 4: {action(3)}" in prompt
        assert "From request 1 to 2: red cotton shirt, -> blue wool scarf,; 10.00 -> 11.00" in prompt


async def test_a_request_that_the_expression_does_not_match_is_a_miss() -> None:
    async with cache(rule("please find me", "Search({})")) as service:
        await warm(service)
        answer = await service.chat("i need a red cotton shirt, please find me one lower than 10.00 dollars")
        assert answer.cache["kind"] == "miss" and answer.cache["reason"] == "the expression does not match"


async def test_requests_join_a_cluster_only_if_their_responses_are_alike_too() -> None:
    odd = rule(ask(1)[:20], '{"sorry": "zzz qqq"}')
    async with cache(odd, response_threshold=0.4) as service:
        for at in range(3):
            await service.chat(ask(at))
        assert [len(cluster["exemplars"]) for cluster in await shown(service)] == [2, 1]


@pytest.mark.parametrize(
    ("replies", "reason"),
    [
        ("I can't.", "no Python block"),
        ("```python\ndef solve(\n```", "does not parse"),
        ("```python\ndef solve(request):\n    return 1\n```", "no PATTERN"),
        ("```python\nPATTERN = '('\ndef solve(request):\n    return 1\n```", "no regular expression"),
        ("```python\nPATTERN = 'x'\n```", "no function `solve`"),
        (NEVER, "does not match this request"),
        (
            "```python\nPATTERN = r'^((\\w+[\\s,.]*)+)+Z'\ndef solve(request):\n    return 'x'\n```",
            "can't be matched",
        ),
    ],
)
async def test_what_is_no_program_is_not_judged_and_the_next_round_is_told(replies: str, reason: str) -> None:
    from methods.execution import IsolatedExecutor, Limits

    async with serving(
        "gencache",
        rules=[*writes(replies, PROGRAM), *judges([1] * 4), *ANSWERS],
        task=GenericTask(),
        config={"request_threshold": 0.5, "response_threshold": 0.5},
        executor=IsolatedExecutor(Limits(wall_s=0.5, cpu_s=1)),
    ) as service:
        await warm(service)
        (work,) = await service.background()
        first, second = work["details"]["attempts"]
        assert reason in first["unusable"] and second["judged"] == [1] * 4
        assert calls(service)["validate"] == 1
        prompts = [r["messages"][1]["content"] for r in service.requests() if "find the pattern" in str(r)]
        assert "An earlier version failed" not in prompts[0] and first["unusable"] in prompts[1]


async def test_half_right_is_accepted_and_the_failing_exemplars_move_out() -> None:
    async with cache(*judges([1, 0, 1, 0])) as service:
        await warm(service)
        kept, moved = await shown(service)
        assert (kept["exemplars"], moved["exemplars"]) == ([ask(0), ask(2)], [ask(1), ask(3)])
        assert kept["entry"] and not moved["entry"]


async def test_too_little_right_is_generated_again_with_the_reason() -> None:
    async with cache(
        *writes(USELESS, PROGRAM), *judges([1, 0, 0, 0], [1] * 4, reason="the price is fixed")
    ) as service:
        await warm(service)
        (work,) = await service.background()
        assert [one["judged"] for one in work["details"]["attempts"]] == [[1, 0, 0, 0], [1] * 4]
        prompts = [r["messages"][1]["content"] for r in service.requests() if "find the pattern" in str(r)]
        assert "the price is fixed" in prompts[1]


async def test_attempts_rounds_skipped_insertions_and_the_cap() -> None:
    async with cache(*writes(NEVER), rounds=2, attempts=2, skip=3, cap=10) as service:
        made = []
        for at in range(20):
            await service.chat(ask(at))
            await service.background()
            made.append(calls(service)["generate"])
        # Four per trigger: at the 4th insertion, after three skipped ones, and what the cap leaves.
        assert made == [0] * 3 + [4] * 3 + [8] * 3 + [10] * 11
        (cluster,) = await shown(service)
        assert (cluster["entries_attempted"], cluster["entries_accepted"]) == (10, 0)
        # An attempt that begins as the first did would only repeat it at temperature 0.
        asked = [r for r in service.requests() if "find the pattern" in str(r["messages"][0]["content"])][:4]
        assert [(r["temperature"], r.get("seed")) for r in asked] == [(0, None), (0.7, 1), (0.7, 2), (0.7, 3)]
        assert len(cluster["exemplars"]) == 12 and cluster["exemplars"][-1] == ask(19)


@pytest.mark.parametrize("judged", ["not json", '{"verdicts": [1], "reason": ""}', '{"verdicts": "yes"}'])
async def test_a_judgement_that_can_t_be_read_says_no(judged: str) -> None:
    async with cache(rule("A program answered", judged), rounds=1, attempts=1) as service:
        await warm(service)
        (work,) = await service.background()
        assert work["details"]["outcome"] == "rejected"
        assert work["details"]["attempts"][0]["judged"] == [0] * 4


async def test_no_judge_makes_an_answer_out_of_none() -> None:
    mute = PROGRAM.replace("return 'Search", "return None and 'Search")
    async with cache(*writes(mute), rounds=1, attempts=1) as service:
        await warm(service)
        (work,) = await service.background()
        assert work["details"]["attempts"][0]["judged"] == [0] * 4


async def test_least_recently_used_clusters_are_evicted_by_size() -> None:
    other = "what is the capital of the country number"
    async with cache(rule(other, "Paris"), exemplar_bytes=9000, program_bytes=500) as service:
        await warm(service)
        first = (await shown(service))[0]
        assert first["entry"] and len(first["exemplars"]) == 4
        for at in range(12):
            await service.chat(f"{other} {at * 37}?")
        first, second = await shown(service)
        assert first["exemplars"] == [] and len(second["exemplars"]) == 12
        await service.background()
        assert (await service.chat(ask(5))).cache["kind"] == "program"


async def test_feedback_deletes_the_program_of_a_wrong_hit() -> None:
    async with cache(*writes(USELESS), name="gencache-feedback") as service:
        await warm(service)
        assert (await service.chat(ask(4))).cache["kind"] == "program"
        work = (await service.background())[-1]
        assert (work["name"], work["details"]["same"]) == ("feedback", False)
        assert (await shown(service))[0]["entry"] is None
    async with cache(name="gencache-feedback") as service:
        await warm(service)
        for at in (4, 5):
            assert (await service.chat(ask(at))).cache["kind"] == "program"
            assert (await service.background())[-1]["details"]["same"] is True


async def test_every_cached_expression_can_be_tried() -> None:
    async with cache(*judges([1, 1, 1, 0]), lookup="all", request_threshold=0.5) as service:
        await warm(service)
        # The exemplar that moved out has opened the cluster that is nearest to its like, without a program.
        assert len(await shown(service)) == 2
        assert (await service.chat(ask(9))).cache["kind"] == "program"


async def test_one_generation_per_cluster_at_a_time_and_nobody_waits() -> None:
    async with cache(*writes(PROGRAM, delay_s=30.0)) as service:
        answers = await asyncio.gather(*(service.chat(ask(at)) for at in range(24)))
        assert [one.text for one in answers] == [action(at) for at in range(24)]
        await until(lambda: calls(service)["generate"] == 1)
        state = await service.events()
        assert sum(len(one["state"]["exemplars"]) for one in state) == 12
        await service.post({}, "/admin/reset")
        assert [one["outcome"] for one in await service.background()] == ["cancelled"]


async def test_a_json_response_is_embedded_value_by_value() -> None:
    async with cache(rule("json please", '{"a": "one", "b": 2}')) as service:
        await service.chat("json please")
        assert service.method._encoder.calls[-1] == ["one", "2"]


def test_what_requests_share_is_shown() -> None:
    texts = [
        f"i need a {item}, below {price} dollars" for item, price in (("red cup", "20.00"), ("hat", "7"))
    ]
    assert _skeleton(texts) == "i need a ..., below ... dollars"
    assert _skeleton(["a b c", "a c"]) == "a ...c" and _skeleton(["a c", "a b c"]) == "a ...c"
    assert _skeleton(["same", "same"]) == "same"
    assert _skeleton(["one", "two"]) == "..."
    assert _skeleton(["x end", "end"]) == "...end" and _skeleton(["begin", "begin y"]) == "begin..."


async def test_instructions_that_all_requests_begin_with_are_left_out() -> None:
    """A small target tries to match them, and fails at their brackets."""
    for shared, cut in (
        ("Do (this) and that for the request below.\n", 42),
        ("Short. ", 0),
        ("no sentence that ends in forty characters or more ", 0),
    ):
        assert _shared_beginning([f"{shared}red", f"{shared}blue"]) == cut
    async with cache() as service:
        for at in range(4):
            messages = [
                {"role": "system", "content": "Reply with one action, Search({...}), for the request."},
                {"role": "user", "content": ask(at)},
            ]
            await service.chat(messages=messages)
        await service.background()
        prompt = next(r["messages"][1]["content"] for r in service.requests() if "find the pattern" in str(r))
        assert "needs no pattern" in prompt and "Search({...})" not in prompt
        assert f"Request 4: {ask(3)}" in prompt
        assert "What all of them share, for PATTERN: i need a ..., and price lower than ... dollars" in prompt


def test_the_fixture_holds_templates() -> None:
    assert len(REQUESTS) >= 24 and len({one["template"] for one in REQUESTS}) == 3
    assert GenCache.Config().nu == 4 and GenCache.Config().gamma == 0.5


@pytest.mark.model
async def test_the_real_target_s_programs_hit_on_template_like_requests(tmp_path: Path) -> None:
    from bench.config import EngineConfig
    from bench.method import Environment
    from methods.execution import IsolatedExecutor
    from runners.client import Endpoint
    from runners.encoder import SentenceEncoder
    from runners.engines.llamacpp import LlamaCppEngine
    from runners.journal import Journal
    from runners.service import Service, create_app
    from tests.serving import listening

    config = EngineConfig(model="qwen2.5-coder-1.5b-instruct-q4_k_m", context=4096, slots=2)
    engine = LlamaCppEngine(config, "target")
    try:
        endpoint = Endpoint(await engine.start(tmp_path), timeout_s=300)
        environment = Environment(GenericTask(), IsolatedExecutor(), SentenceEncoder())
        method = GenCache(GenCache.Config(), environment)
        service = Service("gencache", method, environment, {"target": endpoint}, Journal(None))
        import aiohttp

        async with listening(create_app(service)) as url, aiohttp.ClientSession() as http:
            served = Served(url, service, {}, http)
            first = REQUESTS[0]["template"]
            kinds, right = [], 0
            instructions = (
                'Reply with one action, Search({"keywords": "...", "max_price": "..."}), for the request: '
                "the item, in the words of the request, as keywords, and the price limit as a plain number."
            )
            for one in [one for one in REQUESTS if one["template"] == first]:
                messages = [
                    {"role": "system", "content": instructions},
                    {"role": "user", "content": one["request"]},
                ]
                answer = await served.chat(messages=messages, temperature=0, max_tokens=64)
                await served.background(wait_s=240)
                kinds.append(answer.cache["kind"])
                right += answer.cache["kind"] == "program" and one["price"] in answer.text
            hits = kinds.count("program")
            assert hits >= 2 and right == hits, (kinds, right)
    finally:
        await engine.stop()
