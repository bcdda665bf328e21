"""What an engine answered is written down, under what it was asked."""

from __future__ import annotations

import json
from pathlib import Path

from bench.engine import Completion, EngineCall
from runners.recording import Recording, digest
from runners.store import Run
from tests.running import config, run_here

ASKED = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def completion(text: str = "hello") -> Completion:
    call = EngineCall("target", "answer", "m", 100, 130, 140, 200, 7, 3, 2, finish_reason="stop")
    return Completion(text, "stop", call)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_what_cannot_change_the_answer_is_not_in_the_digest() -> None:
    turned = dict(reversed(ASKED.items()))
    assert digest(ASKED) == digest(turned) == digest({**ASKED, "stream": True, "stream_options": {}})
    for change in ({"temperature": 1}, {"model": "n"}, {"seed": 0}, {"messages": []}):
        assert digest({**ASKED, **change}) != digest(ASKED)
    assert len(digest({**ASKED, "user": "\udc80"})) == 64


def test_a_call_is_one_line_with_durations(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "calls" / "c.jsonl")
    recording.add(ASKED, completion())
    (line,) = lines(tmp_path / "calls" / "c.jsonl")
    assert (line["asked"], line["text"], line["finish_reason"]) == (digest(ASKED), "hello", "stop")
    assert (line["first_token_ns"], line["first_content_ns"], line["finished_ns"]) == (30, 40, 100)
    assert (line["tokens_in"], line["tokens_cached"], line["tokens_out"]) == (7, 3, 2)
    assert line["tokens_drafted"] is None and line["prefill_ns"] is None


def test_it_goes_on_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    Recording(path).add(ASKED, completion())
    path.write_bytes(path.read_bytes() + b'{"asked": "torn')
    recording = Recording(path)
    recording.add(ASKED, completion("again"))
    recording.close()
    recording.add(ASKED, completion("and again"))
    assert [line["text"] for line in lines(path)] == ["hello", "again", "and again"]
    Recording(None).add(ASKED, completion())


def test_a_run_records_every_answered_call_of_every_cell(tmp_path: Path) -> None:
    rules = [{"fault": "500", "times": 1}, {"reply": "```python\nanswer = 1\n```"}]
    run = Run(run_here(tmp_path, config("pot", "exactcache", script={"rules": rules})).path)
    for cell in ("formula+pot", "formula+exactcache"):
        own = [record for record in run.records() if record.cell == cell]
        answered = [call for record in own for call in record.calls if call.error is None]
        found = lines(run.path / "calls" / f"{cell}.jsonl")
        assert len(found) == len(answered) > 0
        assert [line["tokens_out"] for line in found] == [call.tokens_out for call in answered]
        assert {line["purpose"] for line in found} == {call.purpose for call in answered}
