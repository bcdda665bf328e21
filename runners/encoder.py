"""The sentence encoder: all-MiniLM-L6-v2 from the model store, through sentence-transformers."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.encoder import Embedding
from bench.registry import method_class, variant
from runners import models

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from bench.encoder import Vector

__all__ = ["FILES", "SentenceEncoder", "check", "facts", "needed"]

FILES = ("all-minilm-l6-v2", "all-minilm-l6-v2-tokenizer")
"""What the encoder needs of the model store: its weights and its tokenizer."""

_WINDOW = 256
"""Word pieces that the model was made to read at once, the two special tokens among them."""
_CONFIG = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
_TOKENIZER_CONFIG = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}


class SentenceEncoder:
    """all-MiniLM-L6-v2: mean pooling over the word pieces, then unit length.

    One thread does the work, call after call. Each window of a text goes through the model by itself and on
    one core: a vector then depends on nothing but its text, to the last bit. A batch saves a tenth of the
    time, but its padding changes the last bits; a second core saves less than it loses where an engine
    holds one, since both would wait for each other at every layer.
    """

    name = "all-MiniLM-L6-v2"
    dimensions = 384

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encoder")
        self._model: SentenceTransformer | None = None

    async def embed(self, texts: Sequence[str], *, whole: bool = True) -> list[Embedding]:
        """Embed texts; see :meth:`bench.encoder.Encoder.embed`.

        A text longer than the window of 254 word pieces is cut into windows; the mean of their unit vectors,
        weighted by their word pieces and brought to unit length, is its vector.

        Raises:
            ModelMissing: The encoder's files are absent or damaged; the next call looks again.
        """
        if not texts:
            return []
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._embed, [*texts], whole)

    def _embed(self, texts: list[str], whole: bool) -> list[Embedding]:
        if self._model is None:
            self._model = _load()
        return [_embedding(self._model, text, whole) for text in texts]


def _embedding(model: SentenceTransformer, text: str, whole: bool) -> Embedding:
    # JSON can carry half of a surrogate pair, which has no UTF-8 form.
    clean = text.encode("utf-8", "replace").decode("utf-8")
    pieces: list[int] = model.tokenizer(clean, add_special_tokens=False, truncation=False, verbose=False)[
        "input_ids"
    ]
    size = _WINDOW - 2
    windows = [pieces[start : start + size] for start in range(0, len(pieces), size)] or [[]]
    if not whole:
        windows = windows[:1]
    vectors = [_forward(model, window) for window in windows]
    read = sum(map(len, windows))
    if len(windows) == 1:
        return Embedding(vectors[0], len(pieces), read)
    mean = np.average(vectors, axis=0, weights=[len(window) for window in windows])
    return Embedding((mean / np.linalg.norm(mean)).astype(np.float32), len(pieces), read)


def _forward(model: SentenceTransformer, window: list[int]) -> Vector:
    import torch

    tokenizer = model.tokenizer
    ids = torch.tensor([[tokenizer.cls_token_id, *window, tokenizer.sep_token_id]])
    features = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
    }
    with torch.inference_mode():
        vector: Vector = model(features)["sentence_embedding"][0].numpy()
    return vector


def _load() -> SentenceTransformer:
    """Build the model from the store's files; nothing else is read, and no network is asked."""
    weights, tokenizer = map(models.path, FILES)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or it warns at every fork
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    local: dict[str, Any] = {"local_files_only": True}
    with tempfile.TemporaryDirectory(prefix="reusebench-") as made:
        folder = Path(made)
        (folder / "model.safetensors").symlink_to(weights)
        (folder / "tokenizer.json").symlink_to(tokenizer)
        (folder / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER_CONFIG), encoding="utf-8")
        transformer = Transformer(
            made, max_seq_length=_WINDOW, model_kwargs=local, config_kwargs=local, processor_kwargs=local
        )
    modules = [transformer, Pooling(SentenceEncoder.dimensions, "mean"), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu").eval()


def needed(methods: Iterable[str]) -> bool:
    """Say whether any of these methods or variants embeds text.

    Raises:
        UsageError: No such method.
    """
    return any(getattr(method_class(variant(name).method), "needs_encoder", False) for name in methods)


def check() -> None:
    """Make sure of the encoder's files before anything is started that needs them.

    Raises:
        ModelMissing: One is absent or damaged; the message names the command that fetches it.
    """
    for name in FILES:
        models.path(name)


def facts() -> dict[str, Any]:
    """Return what ``run.json`` says of the encoder."""
    return {
        "model": SentenceEncoder.name,
        "sha256": models.model_file(FILES[0]).sha256,
        "dimensions": SentenceEncoder.dimensions,
        "version": f"sentence-transformers {version('sentence-transformers')}, torch {version('torch')}",
    }
