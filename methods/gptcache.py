"""GPTCache: a prompt that is near enough to a stored one gets the stored answer, whatever differs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import os
import shutil
import tempfile
import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from bench.engine import Role
from bench.errors import UsageError
from bench.method import CacheEvent, ChatRequest, Context, Environment, Reply, StateEvent
from bench.samples import Message, text_of
from methods.misspath import ENTRY_FIELDS, MissPath, reply_from
from methods.pot import PoTConfig
from methods.routing import pack_vector, unpack_vector

if TYPE_CHECKING:
    from bench.encoder import Vector

__all__ = ["GPTCache", "prompt_of"]

_NOT_IN_A_PROMPT = ("tools", "functions", "response_format")
_PACKAGES = {"gptcache": "gptcache", "faiss": "faiss-cpu", "sqlalchemy": "sqlalchemy"}
_SHOWN = 120


def prompt_of(messages: Sequence[Message]) -> str:
    """Return the text that stands for a conversation: every message after its role.

    What a message holds beside text (tool calls, names, ids) follows it as JSON.
    """
    lines = []
    for message in messages:
        more = {name: value for name, value in message.items() if name not in ("role", "content") and value}
        tail = f" {json.dumps(more, sort_keys=True)}" if more else ""
        lines.append(f"{message.get('role')}: {text_of(message)}{tail}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A stored answer: the event that put it, its row in the library's store, and its place among all."""

    event: Mapping[str, Any]
    row: int
    serial: int


class GPTCache:
    """Semantic response cache (Bang 2023; MiniCache, section 4.1), by the GPTCache library itself.

    The library keeps prompts and answers in SQLite and vectors in FAISS (a flat, exact index), takes the
    nearest prompt, and answers with what is stored for it where the similarity reaches the threshold. It
    measures 4 minus the squared distance of unit vectors against 4 times its threshold, so a cosine c is a
    threshold of (1 + c) / 2; 0.95 is 0.975. Only the nearest entry is looked at (``top_k`` 1, the default
    of its index; told a temperature, the library would fetch 5 and still answer with the nearest). The
    temperature that it is told is always 0: above, it passes over hits at random.

    What is embedded is the whole prompt, cut at the encoder's window as the library's users have it; each
    reply says how many word pieces there were and how many were read.

    The library knows prompts and answers alone, and takes temperature, seed, stop and max_tokens for the
    same question: a hazard of the method, kept. Models have a store each, and what no prompt can represent
    (tools, functions, a response format, several choices, images) passes it by as a miss. Identical
    requests that miss at the same time each call the engine; the first answer stays. Only complete,
    non-empty text is stored.

    The store lives in a temporary folder and is rebuilt from the events, so it asks for no durability: the
    disk is never waited for. It neither reports each hit into its own database nor evicts by itself (by
    default a fifth of the entries at the 1000th).
    """

    needs_encoder = True

    class Config(PoTConfig):
        """Settings of GPTCache, with those of its miss path.

        Attributes:
            similarity_threshold: Least cosine of a hit, as the paper has it.
            max_entries: Least recently used entries beyond this many are dropped; None keeps all.
        """

        similarity_threshold: float = Field(default=0.95, ge=-1, le=1)
        max_entries: int | None = Field(default=None, ge=1)

        @property
        def gptcache_threshold(self) -> float:
            """The threshold on the library's own scale, in [0, 1]."""
            return (1 + self.similarity_threshold) / 2

    def __init__(self, config: Config, environment: Environment) -> None:
        _import_library()
        self.config = config
        self._miss_path = MissPath(config, environment)
        self._encoder = environment.encoder
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._serials = itertools.count()
        self._stores: dict[str, _Store] = {}
        self._lock = threading.Lock()  # the library serves one caller at a time
        self._counts = {"hits": 0, "misses": 0, "bypassed": 0}
        self._hits: Counter[str] = Counter()

    @staticmethod
    def roles(config: Config) -> tuple[Role, ...]:
        """Return the engine of the miss path."""
        return (config.engine,)

    async def reply(self, request: ChatRequest, context: Context) -> Reply:
        """Serve the nearest stored answer, or compute, store and return one."""
        prompt = prompt_of(request.messages)
        if (reason := _unfit(request, prompt)) is not None:
            self._counts["bypassed"] += 1
            reply, _ = await self._miss_path.solve(request, context, CacheEvent("miss", reason=reason))
            return reply
        with context.trace.stage("embed"):
            (embedding,) = await self._encoder.embed([prompt], whole=False)
        with context.trace.stage("lookup"):
            answer, entry, cosine = await asyncio.to_thread(
                self._look_up, request.model, prompt, embedding.vector
            )
        if answer is not None and entry is not None:
            reply = self._hit(answer, entry, cosine, context)
        else:
            reply = await self._miss(request, context, prompt, embedding.vector, cosine)
        read = {"pieces": embedding.pieces, "read": embedding.read}
        return replace(reply, details={**reply.details, **read})

    def _look_up(
        self, model: str, prompt: str, vector: Vector
    ) -> tuple[str | None, _Entry | None, float | None]:
        """Return the answer (None is a miss), the nearest entry and its cosine (None without entries)."""
        with self._lock:
            store = self._stores.get(model)
            if store is None:
                return None, None, None
            answer, nearest = store.get(prompt, vector)
            if nearest is None:
                return None, None, None
            question, cosine = nearest
            return answer, self._entries[_key(model, question)], cosine

    def _hit(self, answer: str, entry: _Entry, cosine: float | None, context: Context) -> Reply:
        key, saved = entry.event["key"], entry.event["saved_tokens"]
        self._counts["hits"] += 1
        self._hits[key] += 1
        if self.config.max_entries is not None:
            context.commit({"op": "touch", "key": key})
        cache = CacheEvent("semantic", key, cosine, "stored", saved)
        return reply_from({**entry.event, "text": answer}, cache)

    async def _miss(
        self, request: ChatRequest, context: Context, prompt: str, vector: Vector, cosine: float | None
    ) -> Reply:
        self._counts["misses"] += 1
        reason = "empty cache"
        if cosine is not None:
            reason = f"nearest {cosine:.4f} < {self.config.similarity_threshold:g}"
        key = _key(request.model, prompt)
        reply, entry = await self._miss_path.solve(request, context, CacheEvent("miss", key, cosine, reason))
        # The library would keep a second row of a known prompt, and go on answering with the first.
        if entry is not None and _is_text(reply) and key not in self._entries:
            with context.trace.stage("store"):
                context.commit(
                    {
                        "op": "put",
                        "key": key,
                        "model": request.model,
                        "prompt": prompt,
                        "vector": pack_vector(vector),
                        **entry,
                    }
                )
        return reply

    def apply(self, event: StateEvent) -> None:
        """Put or touch one entry; see :class:`bench.method.Stateful`. A put of a known prompt is void."""
        key = event["key"]
        with self._lock:
            if event["op"] == "put":
                if key not in self._entries:
                    self._entries[key] = self._put(event)
            elif event["op"] != "touch":
                raise ValueError(f"no such change: {event['op']!r}")
            if self.config.max_entries is not None:
                if key in self._entries:
                    self._entries.move_to_end(key)
                while len(self._entries) > self.config.max_entries:
                    dropped, entry = self._entries.popitem(last=False)
                    self._stores[entry.event["model"]].drop(entry.row)
                    self._hits.pop(dropped, None)

    def _put(self, event: StateEvent) -> _Entry:
        kept = {name: event[name] for name in ("op", "key", "model", "prompt", "vector", *ENTRY_FIELDS)}
        model, vector = kept["model"], unpack_vector(kept["vector"])
        if kept["key"] != _key(model, kept["prompt"]):
            raise ValueError("the key is not that of the model and the prompt")
        if len(vector) != self._encoder.dimensions:
            raise ValueError(f"a vector of {len(vector)} dimensions, not {self._encoder.dimensions}")
        if not kept["text"]:
            raise ValueError("an empty answer, which the library would not store")
        if model not in self._stores:
            self._stores[model] = _Store(self._encoder.dimensions, self.config.gptcache_threshold)
        row = self._stores[model].put(kept["prompt"], kept["text"], vector)
        return _Entry(kept, row, next(self._serials))

    def reset(self) -> None:
        """Forget every entry and count, and remove the library's files."""
        with self._lock:
            for store in self._stores.values():
                store.close()
            self._stores.clear()
            self._entries.clear()
        self._hits.clear()
        self._counts = dict.fromkeys(self._counts, 0)

    def snapshot(self) -> Iterator[StateEvent]:
        """Yield the puts in their order, which settles ties, and then when each was last used."""
        for entry in sorted(self._entries.values(), key=lambda entry: entry.serial):
            yield entry.event
        if self.config.max_entries is not None:
            for key in self._entries:
                yield {"op": "touch", "key": key}

    def stats(self) -> Mapping[str, int | float | str]:
        """Return the number of entries, the counts, and the threshold on both scales."""
        return {
            "entries": len(self._entries),
            **self._counts,
            "threshold_cosine": self.config.similarity_threshold,
            "threshold_gptcache": self.config.gptcache_threshold,
        }

    def describe(self) -> Mapping[str, Any]:
        """Return every entry: how its prompt begins, its answer, and how often it was served."""
        return {
            "entries": [
                {
                    "key": key,
                    "model": entry.event["model"],
                    "prompt": entry.event["prompt"][:_SHOWN],
                    "answer": entry.event["text"],
                    "hits": self._hits[key],
                }
                for key, entry in self._entries.items()
            ]
        }


def _key(model: str, prompt: str) -> str:
    return hashlib.sha256(json.dumps([model, prompt]).encode()).hexdigest()


def _unfit(request: ChatRequest, prompt: str) -> str | None:
    """Tell why a prompt can't stand for a request; None where it can."""
    for name in _NOT_IN_A_PROMPT:
        if request.params.get(name):
            return f"bypassed: {name}"
    if request.params.get("n") not in (None, 1):
        return "bypassed: n"
    contents = (message.get("content") for message in request.messages)
    if any(
        part.get("type") != "text" for content in contents if isinstance(content, list) for part in content
    ):
        return "bypassed: not text alone"
    return None if _in_utf8(prompt) else "bypassed: not Unicode"


def _is_text(reply: Reply) -> bool:
    """Tell whether the library, which keeps text alone, can give a reply back."""
    return bool(reply.text.strip()) and not reply.tool_calls and _in_utf8(reply.text)


def _in_utf8(text: str) -> bool:
    """Tell whether SQLite can hold a text; half a surrogate pair has no form in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Store:
    """One ``gptcache.Cache`` on files of its own, which go with it."""

    def __init__(self, dimensions: int, threshold: float) -> None:
        library, managers = import_module("gptcache"), import_module("gptcache.manager")
        self._api = import_module("gptcache.adapter.api")
        self._faiss = import_module("faiss")
        folder = Path(tempfile.mkdtemp(prefix="reusebench-gptcache-"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library calls what its own dependencies deprecate
            scalars = managers.CacheBase("sqlite", sql_url=f"sqlite:///{folder / 'sqlite.db'}")
        self._engine = scalars.Session().get_bind()
        self._cache = library.Cache()
        self.close = weakref.finalize(self, _discard, self._cache, self._engine, folder)
        import_module("sqlalchemy").event.listen(self._engine, "connect", _do_not_wait_for_the_disk)
        self._engine.dispose()  # those opened before still wait
        vectors = managers.VectorBase(
            "faiss", dimension=dimensions, index_path=str(folder / "faiss.index"), top_k=1
        )
        self._rows = _Rows()
        self._manager = managers.get_data_manager(scalars, vectors, eviction_base=self._rows)
        similarity = import_module("gptcache.similarity_evaluation")
        self._nearest = _Nearest(similarity.SearchDistanceEvaluation())
        self._cache.init(
            pre_embedding_func=self._api.get_prompt,
            embedding_func=_given_vector,
            data_manager=self._manager,
            similarity_evaluation=self._nearest,
            config=library.Config(
                similarity_threshold=threshold,
                disable_report=True,
                auto_flush=_NEVER,
                enable_token_counter=False,
            ),
        )

    def get(self, prompt: str, vector: Vector) -> tuple[str | None, tuple[str, float] | None]:
        """Return the stored answer (None is a miss), and the nearest prompt with its cosine."""
        self._nearest.seen = None
        # One query has no work for several threads, and waiting for them costs more than the search.
        # The setting is the calling thread's.
        self._faiss.omp_set_num_threads(1)
        answer = self._api.get(prompt, top_k=1, **self._call(vector))
        return answer, self._nearest.seen

    def put(self, prompt: str, answer: str, vector: Vector) -> int:
        """Store an answer and return its row."""
        self._rows.added = None
        self._api.put(prompt, answer, **self._call(vector))
        if self._rows.added is None:  # the library logs what fails here, and goes on
            raise RuntimeError("GPTCache stored nothing; its warning in the log says why")
        return self._rows.added

    def drop(self, row: int) -> None:
        """Delete one row from both databases."""
        self._manager.eviction_manager.soft_evict([row])
        self._manager.eviction_manager.delete()

    def _call(self, vector: Vector) -> dict[str, Any]:
        return {"cache_obj": self._cache, "cache_context": {"embedding_func": vector}, "temperature": 0}


_NEVER = 2**62


def _given_vector(prompt: str, extra_param: Vector, **_: Any) -> Vector:
    """Return the vector that was made for this call before it: the library can't wait for an encoder."""
    return extra_param


def _do_not_wait_for_the_disk(connection: Any, _: object) -> None:
    connection.execute("PRAGMA synchronous = OFF")


def _discard(cache: Any, engine: Any, folder: Path) -> None:
    # The library holds every cache until the process ends, and then writes it out once more.
    cache.data_manager = contextlib.ExitStack()
    engine.dispose()
    shutil.rmtree(folder, ignore_errors=True)


class _Rows:
    """Sits where the library has its eviction policy, and learns there the rows that it makes."""

    def __init__(self) -> None:
        self.added: int | None = None

    def put(self, rows: Sequence[int]) -> None:
        if rows:
            self.added = rows[-1]

    def get(self, row: int) -> None:
        """Nothing is evicted here, whatever is used."""


class _Nearest:
    """The library's evaluation, unchanged; notes what it saw, which a miss tells nobody."""

    def __init__(self, evaluation: Any) -> None:
        self._evaluation = evaluation
        self.range = evaluation.range
        self.seen: tuple[str, float] | None = None

    def evaluation(self, asked: Mapping[str, Any], stored: Mapping[str, Any], **more: Any) -> Any:
        cosine = 1 - float(stored["search_result"][0]) / 2
        self.seen = stored["question"], min(1.0, max(-1.0, cosine))
        return self._evaluation.evaluation(asked, stored, **more)


def _import_library() -> None:
    """Import the library without what it does to its surroundings.

    Raises:
        UsageError: It, or what it needs, is not installed.
    """
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise UsageError(
            f"gptcache needs packages that are not installed. Install them: pip install {' '.join(missing)}"
        )
    handlers = list(logging.root.handlers)
    before = os.environ.get("PIP_NO_INDEX")
    os.environ["PIP_NO_INDEX"] = "1"  # it installs what it misses
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in ("adapter.api", "manager.scalar_data.sql_storage", "manager.vector_data.faiss"):
                import_module(f"gptcache.{module}")
    finally:
        if before is None:
            del os.environ["PIP_NO_INDEX"]
        else:
            os.environ["PIP_NO_INDEX"] = before
        logging.root.handlers[:] = handlers  # it configures the logging of the whole process
