from __future__ import annotations

import pytest
from pydantic import ValidationError

from methods.direct import Direct
from tests.serving import ask, serving

TOOLS = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}]


async def test_the_request_goes_on_unchanged() -> None:
    body = ask("hi", temperature=0, seed=3, stop=["~"], max_tokens=9, tools=TOOLS, own={"x": None})
    body["messages"].insert(0, {"role": "system", "content": [{"type": "text", "text": "be brief"}]})
    async with serving() as service:
        answer = await service.post(body)
        sent = service.requests()[0]
    transport = {"model": "mock-target", "stream": True, "stream_options": {"include_usage": True}}
    assert sent == {**body, **transport}
    assert answer.ok and answer.text == "fine"
    assert answer.cache == {
        "kind": "none",
        "key": None,
        "similarity": None,
        "reason": None,
        "saved_tokens": None,
    }
    assert [(call["engine"], call["purpose"]) for call in answer.calls] == [("target", "answer")]
    assert [name for name, *_ in answer.extension["stages"]] == ["answer"]
    assert answer.details == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_reply_is_passed_on_as_cut(stream: bool) -> None:
    text = '{"name": "basket", "items": ["kale", "rice"'
    async with serving(rules=[{"reply": text, "finish_reason": "length"}]) as service:
        answer = await service.chat(stream=stream)
        assert (answer.text, answer.finish) == (text, "length")
        assert len(service.requests()) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_in_the_reasoning_channel_is_flagged(stream: bool) -> None:
    async with serving(rules=[{"reasoning": "The answer is 9.8"}]) as service:
        off = {"enable_thinking": False}
        answer = await service.chat(stream=stream, chat_template_kwargs=off)
        unsaid = await service.chat(stream=stream)
    assert (unsaid.text, unsaid.details) == ("", {})
    assert (answer.text, answer.finish) == ("The answer is 9.8", "stop")
    assert answer.details == {"from_reasoning": True}


async def test_the_small_engine_can_answer() -> None:
    async with serving(config={"engine": "small"}) as service:
        assert (await service.chat()).calls[0]["engine"] == "small"
        assert not service.requests("target")
    with pytest.raises(ValidationError):
        Direct.Config(engine="medium")  # type: ignore[arg-type]
