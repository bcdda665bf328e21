from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.config import PairConfig
from bench.encoder import Embedding, Encoder
from bench.errors import ModelMissing
from methods.direct import Direct
from runners import encoder as module
from runners import models
from runners.deploy import deploy
from runners.encoder import FILES, SentenceEncoder
from runners.store import list_runs
from tests.running import config, run_here

ROOT = Path(__file__).parents[2]
REAL = SentenceEncoder()

pulled = pytest.mark.skipif(
    any(models.status(name).state not in ("ready", "unchecked") for name in FILES),
    reason="the encoder is not in the store: run `reusebench models pull`",
)

SHORT = [
    "",
    "Rate?",
    "What is the present value of $1,000 due in 5 years at 4.5 %?",
    "Naïve CAFÉ — 東京 costs €3, isn't it? [SEP] \t\n🙂",
    "A bond pays a coupon of 6 % a year. Its face value is 1,000 and its yield to maturity 7 %. " * 3,
]


def long_text(words: int) -> str:
    return " ".join(f"item {number} was sold for {number * 7 % 90} dollars," for number in range(words))


def independent(texts: list[str], starts: tuple[int, ...] = (0,)) -> tuple[Any, list[int]]:
    """The windows of 254 pieces at ``starts``, through the bare model, in one padded batch."""
    import torch
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertModel

    weights, file = map(models.path, FILES)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    pieces = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    windows = [[101, *one[start : start + 254], 102] for one in pieces for start in starts]
    width = max(map(len, windows))
    ids = torch.tensor([one + [0] * (width - len(one)) for one in windows])
    mask = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in windows])
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    model = BertModel(BertConfig(vocab_size=30522, **shape)).eval()
    missing, _ = model.load_state_dict(load_file(weights), strict=False)
    assert missing == []
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state.double()
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return (mean / mean.norm(dim=1, keepdim=True)).numpy(), [len(one) for one in pieces]


def test_nothing_heavy_is_loaded_before_the_first_use() -> None:
    code = (
        "import asyncio, sys\nfrom runners.encoder import SentenceEncoder, check, facts\n"
        "encoder = SentenceEncoder()\nassert asyncio.run(encoder.embed([])) == []\n"
        "print(facts()['version'], *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "torch 2." in done.stdout
    assert not {"torch", "transformers", "sentence_transformers", "sklearn"} & set(done.stdout.split()[4:])


async def test_every_waiting_caller_hears_of_missing_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REUSEBENCH_CACHE", str(tmp_path))
    encoder: Encoder = SentenceEncoder()
    found = await asyncio.gather(*(encoder.embed(["text"]) for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in found] == [ModelMissing] * 3
    assert "reusebench models pull" in str(found[0])


@pulled
@pytest.mark.model
async def test_the_next_call_looks_again(tmp_path: Path) -> None:
    encoder = SentenceEncoder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REUSEBENCH_CACHE", str(tmp_path))
        with pytest.raises(ModelMissing):
            await encoder.embed(["text"])
    assert len(await encoder.embed(["text"])) == 1


@pulled
@pytest.mark.model
@pytest.mark.parametrize("whole", [True, False])
async def test_short_texts_have_the_models_own_vectors(whole: bool) -> None:
    found = await REAL.embed(SHORT, whole=whole)
    vectors, counts = independent(SHORT)
    for one, vector, pieces in zip(found, vectors, counts, strict=True):
        assert one.vector.dtype == np.float32 and one.vector.shape == (REAL.dimensions,)
        assert abs(np.linalg.norm(one.vector) - 1) < 1e-6
        assert np.abs(one.vector - vector).max() < 1e-5
        assert (one.pieces, one.read) == (pieces, pieces)
    assert counts[0] == 0 < counts[1]


@pulled
@pytest.mark.model
async def test_a_long_text_is_the_mean_of_its_windows() -> None:
    text = long_text(70)
    windows, [pieces] = independent([text], (0, 254, 508))
    assert 2 * 254 < pieces < 3 * 254
    mean = 254 * windows[0] + 254 * windows[1] + (pieces - 508) * windows[2]
    [whole], [cut] = await REAL.embed([text]), await REAL.embed([text], whole=False)
    assert np.abs(whole.vector - mean / np.linalg.norm(mean)).max() < 1e-5
    assert abs(np.linalg.norm(whole.vector) - 1) < 1e-6 and whole.vector.dtype == np.float32
    assert (whole.pieces, whole.read) == (pieces, pieces)
    assert np.abs(cut.vector - windows[0]).max() < 1e-5
    assert (cut.pieces, cut.read) == (pieces, 254)


@pulled
@pytest.mark.model
async def test_the_window_holds_254_word_pieces() -> None:
    exact, over = "tax " * 254, "tax " * 255
    found = await REAL.embed([exact, over], whole=False)
    assert [(one.pieces, one.read) for one in found] == [(254, 254), (255, 254)]
    assert np.array_equal(found[0].vector, found[1].vector)
    [more] = await REAL.embed([over])
    assert more.read == 255 and not np.array_equal(more.vector, found[0].vector)


@pulled
@pytest.mark.model
async def test_a_vector_depends_on_its_text_alone() -> None:
    texts = [*SHORT, long_text(40), "tax"]
    together = await REAL.embed(texts)
    reverse = (await REAL.embed(texts[::-1]))[::-1]
    at_once = await asyncio.gather(*(SentenceEncoder().embed([text]) for text in texts))
    for one, other, [alone] in zip(together, reverse, at_once, strict=True):
        assert np.array_equal(one.vector, other.vector)
        assert np.array_equal(one.vector, alone.vector)


@pulled
@pytest.mark.model
async def test_half_a_surrogate_pair_is_text_too() -> None:
    half, mark = await REAL.embed(["price \ud83d up", "price ? up"])
    assert np.array_equal(half.vector, mark.vector)


@pulled
@pytest.mark.model
async def test_paraphrases_are_nearer_than_other_sentences() -> None:
    pairs = [
        ("What is the monthly payment on this loan?", "How much do I have to pay back each month?"),
        ("The company's revenue grew by 12 %.", "Sales of the firm rose twelve percent."),
        ("How do I cook rice?", "What is the right way to boil rice?"),
    ]
    left, right = zip(*pairs, strict=True)
    vectors = [np.stack([one.vector for one in await REAL.embed(side)]) for side in (left, right)]
    cosines = vectors[0] @ vectors[1].T
    others = cosines[~np.eye(len(pairs), dtype=bool)]
    assert cosines.diagonal().min() > others.max() + 0.2
    assert cosines.diagonal().min() > 0.5


@pulled
@pytest.mark.model
async def test_a_caller_that_leaves_harms_nobody() -> None:
    calls = [asyncio.create_task(REAL.embed([f"text {number}"] * 3)) for number in range(4)]
    await asyncio.sleep(0)
    calls[0].cancel()
    calls[2].cancel()
    found = await asyncio.gather(*calls, return_exceptions=True)
    for number, one in enumerate(found):
        if number % 2 == 0:
            assert isinstance(one, asyncio.CancelledError)
            continue
        assert isinstance(one, list)
        [expected] = await REAL.embed([f"text {number}"])
        assert all(np.array_equal(embedding.vector, expected.vector) for embedding in one)


@pulled
@pytest.mark.model
async def test_the_event_loop_goes_on() -> None:
    await REAL.embed(["loaded"])
    call = asyncio.create_task(REAL.embed(SHORT * 2))
    turns = 0
    while not call.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 5
    assert len(call.result()) == 2 * len(SHORT)


@pulled
@pytest.mark.model
async def test_loading_is_silent_and_offline(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    [one] = await SentenceEncoder().embed([long_text(60)])
    assert isinstance(one, Embedding)
    assert capfd.readouterr() == ("", "")


def test_a_run_that_embeds_needs_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Direct, "needs_encoder", True, raising=False)
    monkeypatch.setenv("REUSEBENCH_CACHE", str(tmp_path / "cache"))
    assert module.needed(["pot", "direct-small"]) and not module.needed(["pot"])
    with pytest.raises(ModelMissing, match="reusebench models pull"):
        run_here(tmp_path / "runs", config("direct"))
    [run] = list_runs(tmp_path / "runs")
    assert not any(run.read()["engines"].values()), "no engine was started"
    assert not run.records()
    said: list[str] = []
    pair = PairConfig.model_validate({"target": {"kind": "mock"}})
    with pytest.raises(ModelMissing, match="reusebench models pull"):
        deploy("direct", {}, pair, None, None, "127.0.0.1", 0, None, said.append)
    assert said == []


def test_a_run_says_which_encoder_it_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = run_here(tmp_path / "without", config("direct", n=1)).read()["engines"]
    monkeypatch.setattr(Direct, "needs_encoder", True, raising=False)
    monkeypatch.setattr(module, "check", lambda: None)
    engines = run_here(tmp_path / "with", config("direct", n=1)).read()["engines"]
    assert "encoder" not in without
    assert engines["encoder"] == module.facts()
    assert engines["encoder"]["sha256"] == models.model_file(FILES[0]).sha256
    assert engines["target"]["kind"] == "mock"
