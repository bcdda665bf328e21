"""The story of one request is told from its record alone."""

from __future__ import annotations

from bench.metrics import NS
from bench.records import CacheRecord, ErrorInfo, StageRecord
from reports.story import set_off, story
from tests.synthetic import beside, call, record


def test_a_hit_says_where_it_was_routed_and_what_it_cost() -> None:
    told = story(
        record(
            "formula+minicache",
            4,
            group="Quick Ratio",
            cache=CacheRecord(kind="program", key="group-3/1", similarity=0.912, reason="entry"),
            details={
                "route": {"group": 3, "similarity": 0.912, "new": False, "pieces": 300, "read": 254},
                "values": {"assets": 10, "debt": 5},
                "extraction": None,
            },
            calls=(call(NS // 10, NS // 2, engine="small", purpose="extract"),),
            stages=(StageRecord(name="embed", started=0, finished=NS // 20),),
        ),
        [],
    )
    for part in (
        "request 5: sample s4",
        "the sample's template: Quick Ratio",
        "routed to group 3, cosine 0.912",
        "the encoder read 254 of 300 word pieces",
        "hit (program), group-3/1, entry, cosine 0.912, ok",
        "values: assets = 10, debt = 5",
        "grade: 42 against 42",
        "embed: 0.050 s",
        "small engine, extract: 0.400 s, 200 tokens in, 50 of them cached, 100 out",
    ):
        assert part in told
    assert "extraction" not in told  # nothing is known of it
    assert told.index("embed: ") < told.index("small engine")


def test_a_miss_tells_what_it_set_off() -> None:
    """Why an entry was refused, attempt by attempt."""
    own = record(
        "formula+minicache",
        2,
        cache=CacheRecord(kind="miss", key="group-0", reason="the group has no entry yet"),
        details={"route": {"group": None, "similarity": None}, "program": "a = 1\nanswer = a"},
        calls=(call(0, NS, tokens_drafted=9, tokens_accepted=7),),
    )
    entry = {
        "template": [{"name": "held", "type": "number", "description": "units held"}],
        "code": "def solve(held):\n    return held",
    }
    work = beside(
        "formula+minicache",
        request="r/formula+minicache/0/2/1",
        details={
            "group": 0,
            "outcome": "rejected",
            "attempts": [
                {"attempt": 1, "unusable": "the reply holds no Python block", "summary": "Write a function."},
                {
                    "attempt": 2,
                    "entry": entry,
                    "passed": [True, False],
                    "failures": ["Request 2: held is missing"],
                },
            ],
        },
    )
    other = beside("formula+minicache", request="r/formula+minicache/0/7/1")
    assert set_off(own, [work, other]) == [work]
    told = story(own, [work])
    for part in (
        "routed to nothing known",
        "miss, group-0, the group has no entry yet, ok",
        "| answer = a",
        "7 of 9 drafts accepted",
        "It set off: generate, ok, 1.000 s",
        "outcome: rejected",
        "unusable: the reply holds no Python block",
        "summary: Write a function.",
        "variable held (number): units held",
        "| def solve(held):",
        "failures: Request 2: held is missing",
        "target engine, generate",
    ):
        assert part in told
    assert told.index("attempt 1") < told.index("attempt 2")


def test_failures_are_told_and_nothing_hides() -> None:
    broken = call(0, NS, error=ErrorInfo(type="http", message="502 from the engine"), finished=None)
    told = story(record(outcome="infra_error", cache=None, calls=(broken,)), [])
    assert "error: connection: connection refused" in told
    assert "unfinished" in told and "failed: 502 from the engine" in told
    failed = beside(outcome="error", error=ErrorInfo(type="ValueError", message="broken"), details={})
    assert "error: ValueError: broken" in story(record(), [failed])
    hidden = story(record(reply="a\x1b[31m\u202eb" + "x" * 5000), [])
    assert "\x1b" not in hidden and "\u202e" not in hidden and "characters more" in hidden
