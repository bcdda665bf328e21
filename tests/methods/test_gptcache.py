from __future__ import annotations

import asyncio
import gc
import importlib.util
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.encoder import Embedding
from bench.errors import UsageError
from bench.method import Environment
from bench.registry import workload
from bench.workload import GenericTask
from methods.gptcache import GPTCache, _key, prompt_of
from methods.routing import pack_vector
from runners.client import Endpoint
from runners.encoder import SentenceEncoder
from tests.encoding import HashEncoder
from tests.serving import FakeExecutor, Served, ask, delta, serving, streams

KETTLE = "What does a copper kettle weigh, and who makes it?"
TRAIN = "When does the last night train leave for the coast?"
PIANO = "Are piano lessons still offered on Sundays in June?"
CALL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "price", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}]


class Given:
    """An encoder that knows the vectors of a user's texts beforehand."""

    name = "given"

    def __init__(self, vectors: Mapping[str, Sequence[float]]) -> None:
        self.vectors = {
            f"user: {text}": np.asarray(vector, dtype=np.float32) for text, vector in vectors.items()
        }
        self.dimensions = len(next(iter(self.vectors.values())))

    async def embed(self, texts: Sequence[str], *, whole: bool = True) -> list[Embedding]:
        return [Embedding(self.vectors.get(text, next(iter(self.vectors.values()))), 1, 1) for text in texts]


def turned(cosine: float) -> list[float]:
    """A unit vector of that cosine with (1, 0, …)."""
    return [cosine, math.sqrt(1 - cosine**2), *[0.0] * 14]


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("reusebench-gptcache-*"))


def method(**config: Any) -> GPTCache:
    return GPTCache(GPTCache.Config(**config), Environment(GenericTask(), FakeExecutor(), HashEncoder()))


async def put_event(service: Served) -> dict[str, Any]:
    (event,) = await service.events()
    return dict(event)


@pytest.mark.parametrize(
    ("threshold", "cosine", "hit"),
    [
        (0.95, 0.951, True),
        (0.95, 0.95001, True),
        (0.95, 0.94999, False),
        (0.95, 0.949, False),
        (0.8, 0.801, True),
        (0.8, 0.799, False),
        (0.0, 0.001, True),
        (0.0, -0.001, False),
        (-0.5, -0.499, True),
        (-0.5, -0.501, False),
        (1.0, 0.9999, False),
        (-1.0, -1.0, True),
    ],
)
async def test_the_threshold_is_a_cosine_through_the_library(
    threshold: float, cosine: float, hit: bool
) -> None:
    encoder = Given({"stored": turned(1.0), "asked": turned(cosine)})
    async with serving("gptcache", encoder=encoder, config={"similarity_threshold": threshold}) as service:
        assert (await service.chat("stored")).cache["reason"] == "empty cache"
        asked = await service.chat("asked")
        assert asked.cache["similarity"] == pytest.approx(cosine, abs=1e-6)
        assert asked.cache["kind"] == ("semantic" if hit else "miss")
        assert asked.cache["reason"] == ("stored" if hit else f"nearest {cosine:.4f} < {threshold:g}")
        stats = (await service.get("/admin/stats"))["state"]
        assert stats["threshold_cosine"] == threshold
        assert threshold == pytest.approx(1 - 2 * (1 - stats["threshold_gptcache"]))


def test_the_default_is_the_papers_on_both_scales() -> None:
    config = GPTCache.Config()
    assert config.similarity_threshold == 0.95
    assert config.gptcache_threshold == pytest.approx(0.975)


@pytest.mark.model
async def test_the_threshold_is_a_cosine_for_real_vectors() -> None:
    encoder = SentenceEncoder()
    texts = [KETTLE, "What does a copper kettle weigh, and who made it?", TRAIN, PIANO, KETTLE.upper()]
    vectors = np.stack([one.vector for one in await encoder.embed([f"user: {text}" for text in texts])])
    near: dict[str, Any] = {}
    for cosine in (0.951, 0.949):
        aside = vectors[2] - (vectors[2] @ vectors[0]) * vectors[0]
        aside /= np.linalg.norm(aside)
        near[str(cosine)] = cosine * vectors[0] + math.sqrt(1 - cosine**2) * aside
    kinds = set()
    for asked, vector in [*zip(texts[1:], vectors[1:], strict=True), *near.items()]:
        cosine = float(vector @ vectors[0])
        given = Given({KETTLE: vectors[0], asked: vector})
        async with serving("gptcache", encoder=given) as service:
            await service.chat(KETTLE)
            cache = (await service.chat(asked)).cache
            assert cache["similarity"] == pytest.approx(cosine, abs=1e-5)
            assert cache["kind"] == ("semantic" if cosine >= 0.95 else "miss")
            kinds.add(cache["kind"])
    assert kinds == {"semantic", "miss"}


@pytest.mark.model
async def test_what_lies_beyond_the_encoders_window_changes_nothing() -> None:
    start = "The firm reports on its copper mine and on its night trains. " * 40
    async with serving("gptcache", encoder=SentenceEncoder()) as service:
        first = await service.chat(f"{start}How many trains?")
        assert first.details["read"] < first.details["pieces"]
        assert (await service.chat(f"{start}How much copper?")).cache["kind"] == "semantic"


async def test_a_hit_serves_what_was_stored_and_says_what_it_saved() -> None:
    rule = {"match": "kettle", "reply": "Two pounds.", "times": 1}
    async with serving("gptcache", rules=[rule], default="changed") as service:
        miss = await service.chat(KETTLE)
        hit = await service.chat(KETTLE)
        again = await service.chat(KETTLE)  # a session, which is not used, would refuse the second hit
        assert miss.text == hit.text == again.text == "Two pounds."
        assert miss.cache["kind"] == "miss" and hit.cache["kind"] == again.cache["kind"] == "semantic"
        assert hit.cache["similarity"] == 1.0 and hit.cache["key"] == miss.cache["key"]
        assert hit.cache["saved_tokens"] == miss.usage["completion_tokens"]  # type: ignore[index]
        assert hit.calls == [] and len(service.requests()) == 1
        assert {stage[0] for stage in hit.extension["stages"]} == {"embed", "lookup"}
        far = await service.chat(TRAIN)
        assert far.text == "changed" and far.cache["kind"] == "miss"
        assert far.cache["reason"].startswith("nearest 0.") and -1 <= far.cache["similarity"] < 0.95
        stats = (await service.get("/admin/stats"))["state"]
        assert (stats["entries"], stats["hits"], stats["misses"], stats["bypassed"]) == (2, 2, 2, 0)


async def test_the_reply_says_how_much_of_the_prompt_was_read() -> None:
    encoder = HashEncoder()
    encoder.window = 5
    async with serving("gptcache", encoder=encoder) as service:
        for kind in ("miss", "semantic"):
            answer = await service.chat("one two three four five six seven")
            assert answer.cache["kind"] == kind
            assert (answer.details["pieces"], answer.details["read"]) == (8, 5)
        assert (await service.chat("one two three four, and no other")).cache["kind"] == "semantic"
        (event,) = await service.events()
        assert "pieces" not in event["details"]


async def test_the_whole_conversation_is_embedded() -> None:
    encoder = HashEncoder()
    system = {"role": "system", "content": "Answer in French."}
    parts = [{"type": "text", "text": "Good"}, {"type": "text", "text": "day"}]
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}], "name": None}
    messages = [system, {"role": "user", "content": parts}, called, {"role": "user", "content": "Well?"}]
    async with serving("gptcache", encoder=encoder) as service:
        await service.post({"model": "m", "messages": messages})
    (text,) = encoder.calls[-1]
    assert text == prompt_of(messages)
    assert text.splitlines() == [
        "system: Answer in French.",
        "user: Good",
        "day",
        'assistant:  {"tool_calls": [{"id": "c1"}]}',
        "user: Well?",
    ]


async def test_a_high_temperature_skips_no_hit() -> None:
    async with serving("gptcache") as service:
        await service.chat(KETTLE)
        for temperature in [0, *[1.9] * 15, 2]:
            assert (await service.chat(KETTLE, temperature=temperature)).cache["kind"] == "semantic"


async def test_models_never_share_answers() -> None:
    async with serving("gptcache") as service:
        await service.chat(KETTLE)
        other = await service.chat(KETTLE, model="other")
        assert other.cache["kind"] == "miss" and other.cache["reason"] == "empty cache"
        assert (await service.chat(KETTLE, model="other")).cache["key"] == other.cache["key"]
        assert (await service.chat(KETTLE)).cache["key"] != other.cache["key"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tools": TOOLS}, "bypassed: tools"),
        ({"functions": [{"name": "price"}]}, "bypassed: functions"),
        ({"response_format": {"type": "json_object"}}, "bypassed: response_format"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": KETTLE},
                            {"type": "image_url", "image_url": {"url": "data:,"}},
                        ],
                    }
                ]
            },
            "bypassed: not text alone",
        ),
        ({"messages": [{"role": "user", "content": f"{KETTLE} \ud800"}]}, "bypassed: not Unicode"),
    ],
)
async def test_what_no_prompt_can_represent_passes_by(change: dict[str, Any], reason: str) -> None:
    async with serving("gptcache") as service:
        await service.chat(KETTLE)
        before = await service.events()
        for _ in range(2):
            answer = await service.post({**ask(KETTLE), **change})
            assert answer.ok and answer.cache["kind"] == "miss"
            assert answer.cache["reason"] == reason and answer.cache["similarity"] is None
        assert await service.events() == before and len(service.requests()) == 3
        assert (await service.get("/admin/stats"))["state"]["bypassed"] == 2


@pytest.mark.parametrize(
    "rule",
    [
        {"fault": "empty"},
        {"reply": " \n"},
        {"finish_reason": "length", "reply": "It weighs"},
        {"reply": "", "reasoning": "It weighs two."},
    ],
    ids=["empty", "blank", "cut", "reasoning"],
)
async def test_what_the_library_can_not_give_back_is_never_stored(rule: dict[str, Any]) -> None:
    async with serving("gptcache", rules=[{"match": "kettle", **rule}]) as service:
        for _ in range(2):
            answer = await service.chat(KETTLE)
            assert answer.status == 200 and answer.cache["kind"] == "miss"
        assert await service.events() == []


@pytest.mark.parametrize(
    ("finish", "fields"),
    [
        ("stop", {"content": "half \ud800"}),
        ("tool_calls", {"content": "Let me see.", "tool_calls": [CALL]}),
    ],
    ids=["not Unicode", "tool calls"],
)
async def test_more_than_text_is_never_stored(finish: str, fields: dict[str, Any]) -> None:
    async with (
        serving("gptcache") as service,
        streams(delta(**fields), delta(finish), "[DONE]") as engine,
    ):
        service.service.endpoints = {"target": Endpoint(engine.url)}
        for _ in range(2):
            answer = await service.chat(KETTLE)
            assert (answer.status, answer.text) == (200, fields["content"])
            assert answer.cache["kind"] == "miss"
        assert await service.events() == []


async def test_texts_come_back_as_they_were() -> None:
    text = "zero \0 byte, ' quotes \", emoji 🚂, lines\r\n\tand " + "length " * 2000
    async with serving("gptcache", default=text) as service:
        assert (await service.chat(KETTLE)).text == text
        hit = await service.chat(KETTLE)
        assert hit.cache["kind"] == "semantic" and hit.text == text


async def test_identical_requests_that_miss_together_each_call_and_the_first_answer_stays(
    tmp_path: Path,
) -> None:
    rules = [
        {"match": "kettle", "reply": "quick", "times": 1, "delay_s": 0.05},
        {"match": "kettle", "reply": "slow", "delay_s": 0.2},
    ]
    async with serving("gptcache", rules=rules, state=tmp_path / "state.jsonl") as service:
        answers = await asyncio.gather(*(service.chat(KETTLE) for _ in range(3)))
        assert sorted(answer.text for answer in answers) == ["quick", "slow", "slow"]
        assert len(service.requests()) == 3
        event = await put_event(service)
        assert event["text"] == "quick"
        service.method.apply({**event, "text": "another"})
        assert (await service.chat(KETTLE)).text == "quick"
        assert await put_event(service) == event


async def test_it_answers_again_after_a_restart(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    async with serving("gptcache", state=state) as service:
        first = [await service.chat(text) for text in (KETTLE, TRAIN)]
        events = await service.events()
    async with serving("gptcache", state=state, default="other") as service:
        again = [await service.chat(text) for text in (KETTLE, TRAIN)]
        assert [answer.cache["kind"] for answer in again] == ["semantic"] * 2
        assert [answer.cache["key"] for answer in again] == [answer.cache["key"] for answer in first]
        assert [answer.text for answer in again] == ["fine"] * 2
        assert await service.events() == events


async def test_of_equal_vectors_the_oldest_answers_after_a_restart_too(tmp_path: Path) -> None:
    texts = ["a", "b", "c"]
    encoder = Given({text: turned(1.0) for text in texts})
    rules = [{"match": text, "reply": text, "delay_s": 0.05 * n} for n, text in enumerate(texts)]
    state = tmp_path / "state.jsonl"
    for restarted in (False, True):
        config = {"max_entries": 5}
        async with serving("gptcache", encoder=encoder, rules=rules, state=state, config=config) as service:
            if not restarted:
                await asyncio.gather(*(service.chat(text) for text in texts))
            assert [(await service.chat(text)).text for text in texts] == ["a"] * 3
            events = await service.events()
            assert [event["text"] for event in events if event["op"] == "put"] == texts
            assert (await service.post({"method": "gptcache", "events": events}, "/admin/cache", "PUT")).ok
            assert await service.events() == events
            assert (await service.chat("c")).text == "a"


async def test_nothing_is_evicted_unless_told_so() -> None:
    """By default the library drops 200 of 1000 entries with the next one."""
    cache = method()
    vectors = np.random.default_rng(1).normal(size=(1100, HashEncoder.dimensions))
    async with serving(method=cache, name="gptcache") as service:
        event = await _event_of(service)
        cache.reset()
        for n, vector in enumerate(vectors / np.linalg.norm(vectors, axis=1, keepdims=True)):
            cache.apply(_changed(event, f"prompt {n}", f"answer {n}", vector))
        assert cache.stats()["entries"] == 1100
        first = np.asarray(vectors[0] / np.linalg.norm(vectors[0]), dtype=np.float32)
        answer, entry, _ = cache._look_up("m", "anything", first)
        assert answer == "answer 0" and entry is not None


async def _event_of(service: Served) -> dict[str, Any]:
    assert (await service.chat(KETTLE)).ok
    return await put_event(service)


def _changed(event: dict[str, Any], prompt: str, text: str, vector: Any) -> dict[str, Any]:
    return {
        **event,
        "key": _key("m", prompt),
        "prompt": prompt,
        "text": text,
        "vector": pack_vector(np.asarray(vector, dtype=np.float32)),
    }


async def test_the_least_recently_used_entry_goes_and_is_found_no_more(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    async with serving("gptcache", state=state, config={"max_entries": 2}) as service:
        for text, kind in (
            (KETTLE, "miss"),
            (TRAIN, "miss"),
            (KETTLE, "semantic"),
            (PIANO, "miss"),  # TRAIN goes
            (KETTLE, "semantic"),
        ):
            assert (await service.chat(text)).cache["kind"] == kind
        events = await service.events()
    for _ in range(2):
        async with serving("gptcache", state=state, config={"max_entries": 2}) as service:
            assert await service.events() == events
            nearest = await service.chat(TRAIN)
            assert nearest.cache["kind"] == "miss" and nearest.cache["similarity"] < 0.95
            assert (await service.chat(KETTLE)).cache["kind"] == "semantic"  # PIANO went
            assert (await service.chat(PIANO)).cache["kind"] == "miss"
            await service.post({"method": "gptcache", "events": events}, "/admin/cache", "PUT")


async def test_lookups_and_stores_at_the_same_time_agree() -> None:
    wares = [f"{name} number {n}" for n in range(6) for name in ("kettle", "train", "piano", "vineyard")]
    rules = [{"match": f"{text}$", "reply": text} for text in wares]
    config = {"max_entries": 5, "similarity_threshold": 1.0}
    async with serving("gptcache", rules=rules, config=config) as service:
        for _ in range(3):
            answers = await asyncio.gather(*(service.chat(text) for text in wares * 2))
            assert [answer.text for answer in answers] == wares * 2
        assert (await service.get("/admin/stats"))["state"]["entries"] == 5


async def test_on_a_miss_the_task_decides() -> None:
    program = "```python\nanswer = 6 * 7\n```"
    async with serving("gptcache", task=workload("formula").task, default=program) as service:
        miss = await service.chat(KETTLE)
        hit = await service.chat(KETTLE)
        assert miss.text == hit.text == "42.00"
        assert hit.details["program"] == miss.details["program"]
        assert [call["purpose"] for call in miss.calls] == ["program"] and hit.calls == []


async def test_a_person_can_see_what_is_stored() -> None:
    async with serving("gptcache") as service:
        for _ in range(3):
            answer = await service.chat(KETTLE * 10)
        (entry,) = (await service.get("/admin/cache"))["state"]["entries"]
        assert entry["key"] == answer.cache["key"] and entry["model"] == "m"
        assert entry["prompt"] == f"user: {KETTLE * 10}"[:120]
        assert (entry["answer"], entry["hits"]) == ("fine", 2)


@pytest.mark.parametrize(
    "change",
    [
        {"op": "drop"},
        {"key": "0" * 64},
        {"vector": pack_vector(np.ones(3, dtype=np.float32))},
        {"vector": "?"},
        {"text": ""},
        {"model": None},
    ],
)
async def test_a_foreign_event_leaves_the_state_as_it_was(change: dict[str, Any]) -> None:
    async with serving("gptcache") as service:
        event = await _event_of(service)
        body = {"method": "gptcache", "events": [{**event, **change}]}
        assert (await service.post(body, "/admin/cache", "PUT")).status == 400
        assert await put_event(service) == event
        assert (await service.chat(KETTLE)).cache["kind"] == "semantic"


async def test_its_files_are_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with serving("gptcache") as service:
        assert folders() == set()  # none before there is anything to keep
        event = await _event_of(service)
        (folder,) = folders()
        assert (folder / "sqlite.db").is_file()
        await service.post({}, "/admin/reset")
        assert folders() == set()
    cache = method()
    cache.apply(event)
    assert len(folders()) == 1
    del cache
    gc.collect()
    assert folders() == set()


def test_a_process_that_ends_leaves_nothing_behind_and_says_nothing(tmp_path: Path) -> None:
    code = (
        "import logging, numpy as np\n"
        "from tests.methods.test_gptcache import method\n"
        "from methods.gptcache import _Store\n"
        "cache = method(); store = _Store(64, 0.975)\n"
        "vector = np.full(64, 0.125, dtype=np.float32)\n"
        "assert store.put('prompt', 'answer', vector) == 1\n"
        "assert store.get('prompt', vector)[0] == 'answer'\n"
        "assert not logging.root.handlers\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_the_library_changes_nothing_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = list(logging.root.handlers)
    for value in (None, "0"):
        if value is None:
            monkeypatch.delenv("PIP_NO_INDEX", raising=False)
        else:
            monkeypatch.setenv("PIP_NO_INDEX", value)
        method()
        assert os.environ.get("PIP_NO_INDEX") == value
    assert logging.root.handlers == handlers


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "methods.gptcache.find_spec", lambda name: None if name in ("faiss", "sqlalchemy") else real(name)
    )
    with pytest.raises(UsageError, match="pip install faiss-cpu sqlalchemy$"):
        method()


async def test_a_store_that_fails_is_no_silent_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("gptcache") as service:
        await service.chat(KETTLE)
        (store,) = service.method._stores.values()
        monkeypatch.setattr(store._manager, "save", lambda *_, **__: 1 / 0)
        with pytest.raises(RuntimeError, match="stored nothing"):
            store.put("prompt", "answer", np.ones(64, dtype=np.float32))
