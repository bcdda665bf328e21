"""Which engine stands in which role."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.config import PairConfig
from bench.errors import UsageError
from runners.pair import SPECULATIVE, engines_of, make_engines, start_pair


def test_speculative_decoding_is_a_property_of_the_target() -> None:
    assert engines_of("minicache", ("target", "small")) == {"target": "target", "small": "small"}
    assert engines_of("minicache+specdec", ("target", "small")) == {"target": SPECULATIVE, "small": "small"}
    with pytest.raises(UsageError, match="calls no target"):
        engines_of("pot-small+specdec", ("small",))


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ({"target": {"kind": "llamacpp", "model": "qwen2.5-coder-1.5b-instruct-q4_k_m"}}, "needs a drafter"),
        ({"target": {"kind": "mock"}}, "business of the target's server, which is of kind mock"),
    ],
)
def test_a_pair_without_it_says_what_to_set(pair: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make_engines(PairConfig.model_validate(pair), [SPECULATIVE])


def test_a_pair_without_a_small_engine() -> None:
    with pytest.raises(UsageError, match=r"set pair\.small"):
        make_engines(PairConfig.model_validate({"target": {"kind": "mock"}}), ["target", "small"])


async def test_plain_and_speculative_target_side_by_side(tmp_path: Path) -> None:
    rule = {"reply": "42", "drafted": 6, "accepted": 4}
    config = {"target": {"kind": "mock"}, "specdec": {"kind": "mock", "script": {"rules": [rule]}}}
    names = ["target", SPECULATIVE]
    async with start_pair(PairConfig.model_validate(config), names, tmp_path) as pair:
        plain, drafted = (
            pair.endpoints_of(method, ["target"])["target"] for method in ("pot", "pot+specdec")
        )
        assert plain.url != drafted.url
        probe = await pair.probe()
        assert set(probe) == {"target", "small", SPECULATIVE} and probe["small"] is None
        assert await pair.reset_caches() == {"target": True, SPECULATIVE: True}
