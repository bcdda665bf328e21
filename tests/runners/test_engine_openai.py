from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bench.config import EngineConfig
from bench.errors import EngineUnavailable, UsageError
from runners.engines.mock import MockEngine
from runners.engines.openai import OpenAIEngine

Serve = Callable[..., Any]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """A server with any /v1/models; returns its URL and the paths that were asked for."""
    runners = []

    async def begin(body: Any, status: int = 200, reset: int = 200) -> tuple[str, list[str]]:
        asked: list[str] = []

        async def answer(request: web.Request) -> web.Response:
            asked.append(f"{request.method} {request.path}")
            if request.path == "/reset_prefix_cache":
                return web.Response(status=reset)
            return web.json_response(body, status=status)

        app = web.Application()
        app.router.add_route("*", "/{any:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/v1", asked

    yield begin
    for runner in runners:
        await runner.cleanup()


def engine(url: str | None, **more: Any) -> OpenAIEngine:
    return OpenAIEngine(EngineConfig(kind="openai", url=url, **more), "target")


def models(*names: str, owner: str = "someone") -> dict[str, Any]:
    return {"data": [{"id": name, "owned_by": owner, "max_model_len": 4096} for name in names]}


async def test_the_only_model_is_taken_and_the_key_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mock = MockEngine(EngineConfig(kind="mock", model="m1", script={"api_key": "sesame"}), "target")
    url = await mock.start(tmp_path)
    try:
        one = engine(url + "/", api_key_env="TEST_KEY")
        monkeypatch.delenv("TEST_KEY", raising=False)
        with pytest.raises(EngineUnavailable, match="TEST_KEY, which is absent"):
            await one.start(tmp_path)
        monkeypatch.setenv("TEST_KEY", "wrong")
        with pytest.raises(EngineUnavailable, match="which is set") as caught:
            await one.start(tmp_path)
        assert "wrong" not in str(caught.value)
        monkeypatch.setenv("TEST_KEY", "two\nlines")
        with pytest.raises(EngineUnavailable, match="can't be sent") as caught:
            await one.start(tmp_path)
        assert "lines" not in str(caught.value)
        monkeypatch.setenv("TEST_KEY", "sesame")
        assert await one.start(tmp_path) == url
        assert one.model == "m1"
        assert one.headers() == {"Authorization": "Bearer sesame"}
        probe = await one.probe()
        assert probe["key"] == "set"
        assert "sesame" not in str(probe)
        assert await one.reset_cache() is False
        await one.stop()
    finally:
        await mock.stop()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (None, "pair.target.url is missing"),
        ("127.0.0.1:8000/v1", "must begin with http"),
        ("ftp://host/v1", "must begin with http"),
        ("http://host:8000", 'Did you mean "http://host:8000/v1"'),
        ("http://host/v1/chat/completions", 'Did you mean "http://host/v1"'),
        ("http://me:pw@host/v1", "has credentials"),
        ("http://host/v1?key=1", "leave out what follows"),
        ("http://host:port/v1", "is not a URL"),
    ],
)
def test_bad_urls(url: str | None, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        engine(url)
    assert message in str(caught.value)
    assert "pw" not in str(caught.value)


async def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="can't be reached.*Start that server"):
        await engine("http://127.0.0.1:9/v1").start(tmp_path)


async def test_several_models_need_a_choice(
    tmp_path: Path, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    url, _ = await serve(models("qwen-a", "qwen-b"))
    with pytest.raises(EngineUnavailable, match=r"lists 2 models \(qwen-a, qwen-b\)"):
        await engine(url).start(tmp_path)
    chosen = engine(url, model="qwen-b")
    await chosen.start(tmp_path)
    assert (await chosen.probe())["model_listed"] is True
    with caplog.at_level(logging.WARNING):
        unlisted = engine(url, model="qwen-c")
        await unlisted.start(tmp_path)
    assert "does not list the model" in caplog.text
    assert (await unlisted.probe())["model_listed"] is False


@pytest.mark.parametrize("status", [404, 405])
async def test_a_server_that_lists_nothing(tmp_path: Path, serve: Serve, status: int) -> None:
    url, _ = await serve({}, status=status)
    with pytest.raises(EngineUnavailable, match="`url` is wrong"):
        await engine(url).start(tmp_path)
    named = engine(url, model="m")
    await named.start(tmp_path)
    assert named.model == "m"
    assert (await named.probe())["model_listed"] is None


async def test_other_answers(tmp_path: Path, serve: Serve) -> None:
    url, _ = await serve({"error": {"message": "loading model"}}, status=503)
    with pytest.raises(EngineUnavailable, match="answers 503: loading model.*try again"):
        await engine(url).start(tmp_path)
    url, _ = await serve(["no", "list"])
    with pytest.raises(EngineUnavailable, match="no list of models"):
        await engine(url).start(tmp_path)


@pytest.mark.parametrize(
    ("owner", "reset", "done"), [("vllm", 200, True), ("vllm", 404, False), ("x", 200, False)]
)
async def test_only_vllm_resets(tmp_path: Path, serve: Serve, owner: str, reset: int, done: bool) -> None:
    url, asked = await serve(models("m", owner=owner), reset=reset)
    one = engine(url)
    await one.start(tmp_path)
    assert await one.reset_cache() is done
    assert ("POST /reset_prefix_cache" in asked) is (owner == "vllm")
