from __future__ import annotations

import json
from typing import Any

import pytest

from bench.registry import workload
from methods.execution import IsolatedExecutor
from methods.execution.finish import PRELUDE
from tests.serving import FakeExecutor, Served, ask, serving

FORMULA = workload("formula").task
DIRECT = "About 7."
FENCE = "```python\n"


def script(program: str, **more: Any) -> list[dict[str, Any]]:
    """The target answers the program prompt with ``program``, and any other with DIRECT."""
    return [{"match": r"Reply with the Python program only", "reply": program, **more}, {"reply": DIRECT}]


def purposes(answer: Any) -> list[str]:
    return [call["purpose"] for call in answer.calls]


async def test_the_value_of_the_program_is_the_answer() -> None:
    program = FENCE + "rate = 0.05\nanswer = 1000 * (1 + rate) ** 2\n```"
    async with serving(
        "pot", task=FORMULA, rules=script(program), executor=IsolatedExecutor(concurrency=1)
    ) as service:
        answer = await service.chat(
            "What is 1,000 at 5% after 2 years?", temperature=0, seed=4, max_tokens=7, top_k=3, stop=["x"]
        )
        sent = service.requests()
    assert (answer.text, answer.finish, answer.cache["kind"]) == ("1102.50", "stop", "none")
    assert answer.details == {
        "program": PRELUDE + "rate = 0.05\nanswer = 1000 * (1 + rate) ** 2",
        "program_status": "ok",
    }
    assert purposes(answer) == ["program"]
    assert [name for name, *_ in answer.extension["stages"]] == ["program", "execute"]
    assert [message["role"] for message in sent[0]["messages"]] == ["system", "user"]
    assert "What is 1,000 at 5% after 2 years?" in sent[0]["messages"][1]["content"]
    assert (sent[0]["temperature"], sent[0]["seed"], sent[0]["top_k"]) == (0, 4, 3)
    assert (sent[0]["max_tokens"], sent[0]["stop"]) == (512, ["\n```"])


@pytest.mark.parametrize(
    ("program", "status", "why"),
    [
        ("I think that it is 7.", None, "the reply holds no program"),
        (FENCE + "answer = = 3", "syntax_error", "syntax_error"),
        (FENCE + "answer = 1 / 0", "error", "ZeroDivisionError"),
        (FENCE + "ans = 3\nif True:\n    exit()", "exit", "exit"),
        (FENCE + "import os\nos._exit(0)", "exit", "exit"),
        (FENCE + "pass", "no_value", "no_value"),
        (FENCE + "for year in range(3):\n    unused = year", "no_value", "no_value"),
        (FENCE + "answer = None", "ok", "unusable value"),
        (FENCE + "answer = float('nan')", "ok", "unusable value"),
        (FENCE + "answer = float('inf')", "ok", "unusable value"),
        (FENCE + "answer = [1, 2]", "ok", "unusable value"),
        (FENCE + "answer = 'no idea'", "ok", "unusable value"),
        (FENCE + "answer = 7 ** 90000", "result_too_large", "result_too_large"),
    ],
)
async def test_a_program_that_gives_no_answer_falls_back_and_says_so(
    program: str, status: str | None, why: str
) -> None:
    async with serving(
        "pot", task=FORMULA, rules=script(program), executor=IsolatedExecutor(concurrency=1)
    ) as service:
        answer = await service.chat("How much?", max_tokens=9)
        sent = service.requests()
    assert answer.ok and (answer.text, answer.finish) == (DIRECT, "stop")
    assert purposes(answer) == ["program", "answer"]
    assert why in answer.details["fallback"]
    assert answer.details["program_status"] == status
    assert (answer.details["program"] is None) == (status is None)
    assert sent[1]["messages"] == ask("How much?")["messages"] and sent[1]["max_tokens"] == 9
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == sum(call["tokens_out"] for call in answer.calls)


async def test_after_a_bad_program_the_executor_still_works() -> None:
    rules = [
        {"match": "bad[^`]*Reply with the", "reply": FENCE + "import os\nos._exit(0)"},
        {"match": "good[^`]*Reply with the", "reply": FENCE + "answer = 5"},
        {"reply": DIRECT},
    ]
    async with serving("pot", task=FORMULA, rules=rules, executor=IsolatedExecutor(concurrency=1)) as service:
        assert [(await service.chat(text)).text for text in ("bad", "good")] == [DIRECT, "5.00"]


async def test_the_statuses_of_isolation_fall_back_too() -> None:
    for status in ("timeout", "memory_limit", "output_limit", "refused", "crashed"):
        executor = FakeExecutor(status, None, "what happened")
        rules = script(FENCE + "answer = 3")
        async with serving("pot", task=FORMULA, rules=rules, executor=executor) as service:
            answer = await service.chat()
        assert executor.programs == [PRELUDE + "answer = 3"]
        assert answer.text == DIRECT and answer.details["program_status"] == status
        assert answer.details["fallback"] == f"{status}: what happened"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["pot", "exactcache"])
async def test_a_failure_of_the_executor_is_no_answer(name: str, stream: bool) -> None:
    executor = FakeExecutor("executor_error", None, "no zygote")
    async with serving(name, task=FORMULA, rules=script(FENCE + "answer = 3"), executor=executor) as service:
        answer = await service.chat(stream=stream)
        assert answer.status == 500 and answer.error is not None
        assert answer.error["code"] == "ExecutorFailed" and "no zygote" in answer.error["message"]
        assert [call["purpose"] for call in answer.calls] == ["program"]
        assert await service.events() == []


@pytest.mark.parametrize(
    ("program", "run"),
    [
        (FENCE + "rate = 0.05\nanswer = rate", []),  # nothing closed it: half a program
        (FENCE + "answer = 1\n~~~\nthen", []),
        ("~~~python\nanswer = 1\n~~~\nand then", [PRELUDE + "answer = 1"]),  # a whole one came before the cut
    ],
)
async def test_a_cut_program_is_not_run(program: str, run: list[str]) -> None:
    executor = FakeExecutor(value=1)
    rules = script(program, finish_reason="length")
    async with serving("pot", task=FORMULA, rules=rules, executor=executor) as service:
        answer = await service.chat()
    assert executor.programs == run
    assert answer.text == ("1.00" if run else DIRECT)
    assert purposes(answer) == (["program"] if run else ["program", "answer"])


TOOLS = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": "{}"}}
RESULT = [
    {"role": "user", "content": "price?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "12.5"},
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.mark.parametrize(
    "body",
    [
        {"tools": TOOLS},
        {"functions": [TOOLS[0]["function"]]},
        {"response_format": {"type": "json_object"}},
        {"messages": RESULT},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "which?"}, IMAGE]}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]},
        {"messages": [{"role": "system", "content": "x"}]},
    ],
    ids=["tools", "functions", "format", "tool result", "image", "prefill", "no user"],
)
async def test_what_no_program_can_answer_goes_direct(body: dict[str, Any]) -> None:
    async with serving("pot", task=FORMULA, rules=script(FENCE + "answer = 3")) as service:
        answer = await service.post({**ask(), **body})
        sent = service.requests()
    assert answer.text == DIRECT and purposes(answer) == ["answer"]
    assert sent[0]["messages"] == {**ask(), **body}["messages"]
    assert sent[0].get("tools") == body.get("tools")


async def test_the_conversation_before_the_question_is_kept() -> None:
    conversation = [
        {"role": "system", "content": "own rules"},
        *RESULT,
        {"role": "assistant", "content": "It is 12.5."},
        {"role": "developer", "content": "more rules"},
        {"role": "user", "content": [{"type": "text", "text": "and {request} doubled?"}]},
    ]
    async with serving("pot", task=FORMULA, rules=script(FENCE + "answer = 25")) as service:
        answer = await service.post({"messages": conversation})
        sent = service.requests()[0]["messages"]
    assert answer.text == "25.00"
    assert [message["role"] for message in sent] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert sent[1:5] == conversation[1:5]
    assert sent[0]["content"].endswith("\n\nown rules\n\nmore rules")
    assert "Request: and {request} doubled?" in sent[5]["content"]
    assert "None" not in json.dumps(conversation[0:1] + sent[1:])


async def test_settings_reach_the_program_call() -> None:
    config = {"engine": "small", "max_tokens": 99, "stop": ("END",)}
    async with serving("pot", task=FORMULA, rules=script("answer = 4END"), config=config) as service:
        answer = await service.chat()
        sent = service.requests("small")[0]
        assert (answer.text, sent["max_tokens"], sent["stop"]) == ("4.00", 99, ["END"])
        assert not service.requests("target")


async def test_a_stop_of_the_request_cuts_the_computed_answer() -> None:
    async def texts(service: Served) -> list[str]:
        return [(await service.chat(stop=".", stream=stream)).text for stream in (False, True)]

    async with serving("pot", task=FORMULA, rules=script(FENCE + "answer = 12.5")) as service:
        assert await texts(service) == ["12", "12"]
        assert service.requests()[0]["stop"] == ["\n```"]  # the request's own is not for the program
