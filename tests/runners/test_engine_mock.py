from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.config import EngineConfig
from bench.errors import UsageError
from runners.engines.mock import MockEngine

ROOT = Path(__file__).resolve().parents[2]
HELLO = [{"role": "user", "content": "hello there"}]

Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    engines = []

    async def begin(**script: Any) -> tuple[MockEngine, str]:
        engine = MockEngine(EngineConfig(kind="mock", script=script), "target")
        engines.append(engine)
        return engine, await engine.start(tmp_path)

    yield begin
    for engine in engines:
        await engine.stop()
        await engine.stop()


async def post(url: str, **body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/chat/completions", json={"messages": HELLO, **body}) as response,
    ):
        return response.status, await response.json()


async def stream(url: str, **body: Any) -> list[Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/chat/completions", json={"messages": HELLO, "stream": True, **body}) as response,
    ):
        assert response.status == 200
        text = (await response.read()).decode()
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def content(events: list[Any]) -> str:
    choices = [c for event in events if event != "[DONE]" for c in event.get("choices", [])]
    return "".join(choice["delta"].get("content", "") for choice in choices)


async def test_the_first_live_rule_answers(start: Start) -> None:
    engine, url = await start(
        rules=[
            {"match": "hel+o", "reply": "once", "times": 1},
            {"match": "hello", "reply": "later"},
        ],
        default="else",
    )
    said = [(await post(url))[1]["choices"][0]["message"]["content"] for _ in range(3)]
    assert said == ["once", "later", "later"]
    other = await post(url, messages=[{"role": "user", "content": [{"type": "text", "text": "bye"}]}])
    assert other[1]["choices"][0]["message"]["content"] == "else"
    assert [body["messages"] for body in engine.requests[:3]] == [HELLO] * 3


async def test_usage_counts_words_and_the_shared_prefix(start: Start) -> None:
    engine, url = await start(default="one two three")
    _, first = await post(url)
    _, again = await post(url)
    assert first["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    assert await engine.reset_cache()
    assert (await post(url))[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_limits_and_stops(start: Start) -> None:
    _, url = await start(default="one two three\nfour")
    _, cut = await post(url, max_tokens=2)
    assert cut["choices"][0]["message"]["content"] == "one two"
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 2
    _, stopped = await post(url, stop=["\n"])
    assert stopped["choices"][0]["message"]["content"] == "one two three"
    assert stopped["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("delay", [0.0, 0.002])
async def test_a_stream_has_usage_only_where_asked(start: Start, delay: float) -> None:
    _, url = await start(rules=[{"reply": "a b  c\n", "reasoning": "hm so", "token_delay_s": delay}])
    plain = await stream(url)
    assert plain[-1] == "[DONE]"
    assert content(plain) == "a b  c\n"
    thought = [e["choices"][0]["delta"].get("reasoning_content", "") for e in plain[:-1]]
    assert "".join(thought) == "hm so"
    assert all("usage" not in event for event in plain[:-1])
    assert plain[-2]["choices"][0]["finish_reason"] == "stop"
    asked = await stream(url, stream_options={"include_usage": True})
    assert asked[-2]["choices"] == []
    assert asked[-2]["usage"]["completion_tokens"] == 6
    assert all(event["usage"] is None for event in asked[:-2])


@pytest.mark.parametrize("code", ["400", "429", "500"])
async def test_error_answers(start: Start, code: str) -> None:
    _, url = await start(rules=[{"fault": code, "times": 1}])
    status, body = await post(url)
    assert status == int(code)
    assert body["error"]["message"] == f"scripted {code}"
    assert (await post(url))[0] == 200


async def test_connection_faults(start: Start) -> None:
    _, url = await start(
        rules=[{"match": "bye", "fault": "disconnect"}, {"fault": "cut_stream", "reply": "a b c d"}]
    )
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await post(url, messages=[{"role": "user", "content": "bye"}])
    with pytest.raises(aiohttp.ClientPayloadError):
        await post(url)
    with pytest.raises(aiohttp.ClientPayloadError):
        await stream(url)


async def test_a_cut_stream_brings_its_first_half(start: Start) -> None:
    _, url = await start(rules=[{"fault": "cut_stream", "reply": "a b c d"}])
    got = b""
    async with aiohttp.ClientSession() as session:
        body = {"messages": HELLO, "stream": True}
        async with session.post(f"{url}/chat/completions", json=body) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                async for chunk in response.content.iter_any():
                    got += chunk
    assert b'" b"' in got
    assert b'" c"' not in got
    assert b'"finish_reason": "stop"' not in got


async def test_faults_inside_a_stream(start: Start) -> None:
    _, url = await start(
        rules=[
            {"match": "error", "fault": "error_event", "reply": "a b"},
            {"match": "role", "fault": "role_only", "reply": "a b"},
            {"match": "empty", "fault": "empty", "reply": "a b"},
        ]
    )

    async def of(word: str) -> list[Any]:
        return await stream(url, messages=[{"role": "user", "content": word}])

    broken = await of("error")
    assert broken[-1]["error"]["message"] == "scripted error"
    assert content(broken) == "a"
    role = await of("role")
    assert [e["choices"][0]["delta"] for e in role[:-1]] == [{"role": "assistant", "content": ""}]
    assert role[0]["choices"][0]["finish_reason"] is None
    empty = await of("empty")
    assert content(empty) == ""
    assert empty[-2]["choices"][0]["finish_reason"] == "stop"


async def test_delays_and_stalls_end_with_the_client_and_the_server(start: Start) -> None:
    engine, url = await start(rules=[{"match": "hello", "fault": "stall", "reply": "a b"}, {"delay_s": 0.1}])
    began = time.monotonic()
    assert (await post(url, messages=[{"role": "user", "content": "slow"}]))[0] == 200
    assert time.monotonic() - began >= 0.1
    timeout = aiohttp.ClientTimeout(total=0.2)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        with pytest.raises(TimeoutError):
            await session.post(f"{url}/chat/completions", json={"messages": HELLO})
    began = time.monotonic()
    await engine.stop()
    assert time.monotonic() - began < 2


async def test_a_bad_body_is_refused(start: Start) -> None:
    _, url = await start()
    async with aiohttp.ClientSession() as session:
        for data in (b"{", b"[]", b'{"messages": 3}'):
            async with session.post(f"{url}/chat/completions", data=data) as response:
                assert response.status == 400


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"rulez": []}, "rulez: unknown key"),
        ({"rules": [{"replly": "x"}]}, 'Did you mean "reply"'),
        ({"rules": [{"match": "("}]}, "no regular expression"),
        ({"rules": [{"fault": "503"}]}, "rules.0.fault"),
    ],
)
def test_a_bad_script_is_refused(script: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        MockEngine(EngineConfig(kind="mock", script=script), "target")


async def test_as_a_process(tmp_path: Path) -> None:
    script = tmp_path / "script.toml"
    script.write_text('default = "from a file"\n')
    command = [sys.executable, "-m", "runners.engines.mock", "--script", str(script)]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stderr is not None
        url = process.stderr.readline().strip()
        _, body = await post(url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert body["choices"][0]["message"]["content"] == "from a file"
