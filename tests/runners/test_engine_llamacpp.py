from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.config import EngineConfig
from bench.errors import EngineUnavailable, ModelMissing, UsageError
from bench.method import Trace
from runners import models
from runners.chat import open_session
from runners.client import Endpoint, InstrumentedClient
from runners.engines.llamacpp import LlamaCppEngine, default_threads

SMALL = "qwen2.5-coder-0.5b-instruct-q4_k_m"
ROOT = Path(__file__).resolve().parents[2]
# One thread: on a busy machine, two that wait for each other are slower.
CONFIG = EngineConfig(model=SMALL, context=1024, slots=2, threads=1)

needs_model = pytest.mark.skipif(
    models.status(SMALL).state not in ("ready", "unchecked"),
    reason=f"the model {SMALL} is not in {models.store()}: run `reusebench models pull`",
)


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture
async def engine(log_dir: Path) -> AsyncIterator[LlamaCppEngine]:
    one = LlamaCppEngine(CONFIG, "small")
    yield one
    await one.stop()
    await one.stop()


async def chat(url: str, text: str, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24, **body}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/chat/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


async def gone(pid: int, within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < end:
        await asyncio.sleep(0.05)
    return not alive(pid)


def test_the_model_must_be_known() -> None:
    with pytest.raises(UsageError, match="pair.small.model is missing"):
        LlamaCppEngine(EngineConfig(), "small")
    with pytest.raises(UsageError, match="Did you mean"):
        LlamaCppEngine(EngineConfig(model="qwen2.5-coder-0.5b"), "small")


@pytest.mark.parametrize("key", ["model", "drafter"])
def test_a_sentence_encoder_is_no_language_model(key: str) -> None:
    config = EngineConfig.model_validate({"model": SMALL, key: "all-minilm-l6-v2"})
    with pytest.raises(
        UsageError, match=rf"pair\.target\.{key}: all-minilm-l6-v2 is a sentence encoder"
    ) as caught:
        LlamaCppEngine(config, "target")
    assert SMALL in str(caught.value) and "tokenizer" not in str(caught.value)


async def test_an_absent_model_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REUSEBENCH_CACHE", str(tmp_path))
    one = LlamaCppEngine(CONFIG, "small")
    with pytest.raises(ModelMissing, match="reusebench models pull"):
        await one.start(tmp_path)
    assert one.pid is None


async def test_a_server_that_dies_at_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rubbish = tmp_path / "rubbish.gguf"
    rubbish.write_bytes(b"no model at all")
    monkeypatch.setattr(models, "path", lambda name: rubbish)
    one = LlamaCppEngine(CONFIG, "small")
    with pytest.raises(EngineUnavailable, match=r"ended while it loaded \(exit code 1\)") as caught:
        await one.start(tmp_path)
    assert "rubbish.gguf" in str(caught.value)
    assert one.pid is None


def test_default_threads() -> None:
    assert 1 <= default_threads() <= (os.cpu_count() or 1)


@pytest.mark.model
@needs_model
async def test_it_serves_and_is_restarted(engine: LlamaCppEngine, log_dir: Path) -> None:
    engine.CHECK_S, engine.HANG_S = 0.3, 1.0
    url = await engine.start(log_dir)
    probe = await engine.probe()
    assert probe["model"] == engine.model == SMALL
    assert probe["sha256"] == models.model_file(SMALL).sha256
    assert (probe["context"], probe["slots"], probe["restarts"]) == (1024, 2, 0)
    assert probe["quantization"] == "Q4_K - Medium"

    prompt = "What is the capital of France? " + "Answer in one word. " * 3
    answers = [await chat(url, prompt) for _ in range(2)]
    assert "Paris" in answers[0]["choices"][0]["message"]["content"]
    assert answers[0]["model"] == SMALL
    assert answers[0]["choices"] == answers[1]["choices"]  # temperature 0: the same text
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached[0] == 0
    assert cached[1] > 30
    assert await engine.reset_cache() is True
    after = await chat(url, prompt)
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    schema = {
        "type": "object",
        "properties": {"price": {"type": "number"}, "years": {"type": "integer"}},
        "required": ["price", "years"],
        "additionalProperties": False,
    }
    shaped = await chat(
        url,
        "Extract the variables: the price is 12.5 dollars, paid over 3 years.",
        response_format={"type": "json_schema", "json_schema": {"name": "v", "schema": schema}},
        max_tokens=64,
    )
    assert json.loads(shaped["choices"][0]["message"]["content"]) == {"price": 12.5, "years": 3}

    body = {
        "messages": [{"role": "user", "content": "Count: one two three"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 8,
        "temperature": 0,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/chat/completions", json=body) as response,
    ):
        events = [
            json.loads(line.removeprefix(b"data: "))
            async for line in response.content
            if line.startswith(b"data: {")
        ]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 8
    assert len([e for e in events if e["choices"] and e["choices"][0]["delta"].get("content")]) > 3

    for number, restarts in ((signal.SIGKILL, 1), (signal.SIGSTOP, 2)):
        before = engine.pid
        assert before is not None
        os.kill(before, number)
        end = time.monotonic() + 40
        while time.monotonic() < end:
            now = await engine.probe()
            if (now["state"], now["restarts"]) == ("up", restarts):
                break
            await asyncio.sleep(0.05)
        revived = await chat(url, prompt)
        assert "Paris" in revived["choices"][0]["message"]["content"]
        assert engine.pid != before
        assert not alive(before)
    pid = engine.pid
    assert pid is not None
    await engine.stop()
    assert not alive(pid)
    with pytest.raises(EngineUnavailable, match="does not answer"):
        await engine.reset_cache()


@pytest.mark.model
@needs_model
async def test_prompts_of_different_kinds_keep_a_slot_each(engine: LlamaCppEngine, log_dir: Path) -> None:
    """They begin alike, as extraction prompts do; neither may overwrite the other while a slot is free."""
    url = await engine.start(log_dir)
    kinds = [
        "rate: yearly interest rate of the loan\namount: what the bank lends\nyears: how long it lends it",
        "price: closing price of the share\nbook: net assets for each share\nshares: how many were issued",
    ]

    async def cached(kind: str, text: str) -> int:
        system = f"Find the value of each variable in the text. Reply with JSON only.\n{kind}"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        usage = (await chat(url, "", messages=messages, max_tokens=1))["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    text = "Known are the values 700, 80 and 9, in the order in which the clerk of the town wrote them down."
    for kind in kinds:
        await cached(kind, text)
    again = [await cached(kind, f"This time it is different. {text}") for kind in kinds]
    assert min(again) > 40, again


@pytest.mark.model
@needs_model
async def test_a_drafter_changes_no_answer(engine: LlamaCppEngine, log_dir: Path, tmp_path: Path) -> None:
    """The small model drafts for itself: at temperature 0 the target accepts what it would have said."""
    prompt = "Write a Python function that returns the sum of the squares of a list."
    plain = await chat(await engine.start(log_dir), prompt, max_tokens=48)
    await engine.stop()
    config = CONFIG.model_copy(update={"drafter": SMALL, "draft_max": 4, "nice": 5})
    drafted = LlamaCppEngine(config, "target+specdec")
    try:
        url = await drafted.start(tmp_path)
        async with open_session() as session:
            client = InstrumentedClient(session, Endpoint(url, model=SMALL), "target", Trace(0))
            params = {"temperature": 0, "max_tokens": 48}
            answer = await client.chat([{"role": "user", "content": prompt}], purpose="answer", params=params)
        assert answer.text == plain["choices"][0]["message"]["content"]
        call = answer.call
        assert call.tokens_out == 48 and call.tokens_drafted and call.tokens_accepted
        assert 0.8 * call.tokens_drafted <= call.tokens_accepted <= call.tokens_drafted
        probe = await drafted.probe()
        assert (probe["drafter"], probe["draft_max"]) == (SMALL, 4)
        assert probe["drafter_sha256"] == models.model_file(SMALL).sha256
        if sys.platform == "linux":
            stat = Path(f"/proc/{drafted.pid}/stat").read_text(encoding="utf-8")
            assert int(stat.rsplit(")", 1)[1].split()[16]) == min(19, os.nice(0) + config.nice)
    finally:
        await drafted.stop()


@pytest.mark.model
@needs_model
async def test_it_stays_down_after_too_many_restarts(engine: LlamaCppEngine, log_dir: Path) -> None:
    engine.MAX_RESTARTS = 0
    await engine.start(log_dir)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    for _ in range(100):
        if engine.pid is None:
            break
        await asyncio.sleep(0.05)
    assert "exit code -9" in str((await engine.probe())["failure"])
    with pytest.raises(EngineUnavailable, match="exit code -9"):
        await engine.reset_cache()


@pytest.mark.model
@needs_model
async def test_no_orphan_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, pathlib
from bench.config import EngineConfig
from runners.engines.llamacpp import LlamaCppEngine
async def main():
    engine = LlamaCppEngine(EngineConfig(model={SMALL!r}, context=512, threads=1), "small")
    await engine.start(pathlib.Path({str(tmp_path)!r}))
    print(engine.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(await asyncio.to_thread(parent.stdout.readline))
        assert alive(pid)
        parent.kill()
    assert await gone(pid)
