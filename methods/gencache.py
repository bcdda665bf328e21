"""GenCache: programs that read a request by regular expression, generated from clusters of like requests."""

from __future__ import annotations

import ast
import asyncio
import difflib
import json
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from bench.engine import Role
from bench.errors import ExecutorFailed
from bench.method import CacheEvent, ChatRequest, Context, Environment, Reply, StateEvent
from bench.samples import Message, text_of
from methods.execution.extract import extract_program
from methods.misspath import MissPath
from methods.pot import PoTConfig, bypass_reason
from methods.routing import CentroidIndex, pack_vector, unpack_vector

if TYPE_CHECKING:
    from bench.encoder import Vector

__all__ = ["GenCache"]

_RUN = """
import re as _re
_solve = solve
def solve(pattern, request):
    if _re.search(pattern, request) is None:
        return [False, None]
    value = _solve(request)
    return [True, None if value is None else str(value)]
"""
"""Matching is part of the isolated program: a pattern that never ends is stopped with it."""
_MATCH = """
import re
def solve(pattern, requests):
    return [re.search(pattern, request) is not None for request in requests]
"""


_TOKEN = re.compile(r"\d[\d.,]*\d|\w+|\s+|[^\w\s]")
_GAPS = re.compile(r"\.\.\.(?:\s*\.\.\.)+")
_END = re.compile(r"\n|[.!?]\s")
_LEAST_SHARED = 40
"""Characters of a shared beginning that are worth leaving out."""


class _Unusable(ValueError):
    """The target's reply is no entry; the message says why."""


@dataclass(frozen=True, slots=True)
class _Exemplar:
    """A request and its response, with their embeddings packed."""

    request: str
    response: str
    request_vector: str
    response_vector: str

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return sum(len(text.encode()) for text in asdict(self).values())


@dataclass(frozen=True, slots=True)
class _Entry:
    """A cached program.

    Attributes:
        pattern: What a request must match.
        code: Defines ``solve(request)``.
    """

    pattern: str
    code: str

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.pattern.encode()) + len(self.code.encode())


@dataclass(slots=True)
class _Cluster:
    """Requests with like prompts and like responses.

    Attributes:
        id: Number, from 0; also its row in both indexes.
        exemplars: Oldest first.
        entry: The cached program, or None.
        skip: Insertions to let pass before the next generation.
        generations: Programs that the target has written for it.
        attempted, accepted: Those, and how many of them were installed.
        hits: Requests answered.
        used: Turn of its last insertion or hit, for eviction.
        reason: Why the last generation failed.
    """

    id: int
    exemplars: list[_Exemplar] = field(default_factory=list)
    entry: _Entry | None = None
    skip: int = 0
    generations: int = 0
    attempted: int = 0
    accepted: int = 0
    hits: int = 0
    used: int = 0
    reason: str | None = None


class GenCache:
    """Generative cache of Chakraborty et al., NeurIPS 2025, reproduced (MiniCache, section A.5).

    Requests whose prompts and responses are like those of a cluster join it. From ν exemplars on, the target
    writes, in the background, a regular expression that matches the cluster's requests and a program that
    reads a request with it and gives the response; another call judges what the program gives for the
    exemplars. A request is a hit where its nearest cluster's expression matches and the program gives an
    answer. Responses are what the miss path replied; no gold label is used.

    A request that asks for more than plain text, or is part of a conversation, takes the miss path and is not
    kept. In the variant with ``feedback`` the target answers hits too, in the background, in the place of a
    user who complains about a wrong one; those calls are part of its cost.
    """

    needs_encoder = True

    class Config(PoTConfig):
        """Settings of GenCache, with those of its miss path.

        Attributes:
            nu: Exemplars from which a program is generated (ν; 4, and 10 for WebShop).
            request_threshold: Cosine with a cluster's mean prompt above which a request may join it.
            response_threshold: Cosine with its mean response above which it may join it.
            exemplars_per_nu: A cluster keeps this many times ν exemplars, the newest.
            gamma: Share of exemplars that a program must answer as judged (γ).
            rounds: Validation rounds per attempt; each after the first has a new program.
            attempts: Attempts per trigger.
            skip: Insertions without a trigger after the attempts have failed.
            cap: Programs generated per cluster at most (ρ).
            lookup: Try the program of the ``nearest`` cluster, or ``all`` whose expression matches, nearest
                first.
            exemplar_bytes: Exemplars beyond this size in all go, least recently used cluster first.
            program_bytes: Likewise programs.
            feedback: Whether a wrong hit deletes its program.
            feedback_share: Share of hits on which there is feedback.
            temperature: Of every program of a trigger but its first (ours): at temperature 0 an attempt that
                begins anew would only repeat the first.
            generation_max_tokens: Cap on a program, tokens (ours).
            judge_max_tokens: Cap on a judgement, tokens (ours).
            parallel_generations: Clusters whose programs are made at the same time; others wait (ours).
            seed: Seeds which hits get feedback, and all programs of a trigger but the first.
        """

        nu: int = Field(default=4, ge=1)
        request_threshold: float = Field(default=0.8, ge=-1, le=1)
        response_threshold: float = Field(default=0.75, ge=-1, le=1)
        exemplars_per_nu: int = Field(default=3, ge=1)
        gamma: float = Field(default=0.5, gt=0, le=1)
        rounds: int = Field(default=3, ge=1)
        attempts: int = Field(default=3, ge=1)
        skip: int = Field(default=5, ge=0)
        cap: int = Field(default=30, ge=1)
        lookup: Literal["nearest", "all"] = "nearest"
        exemplar_bytes: int = Field(default=200_000_000, ge=1)
        program_bytes: int = Field(default=20_000_000, ge=1)
        feedback: bool = False
        feedback_share: float = Field(default=1, ge=0, le=1)
        temperature: float = Field(default=0.7, gt=0)
        generation_max_tokens: int = Field(default=256, ge=16)
        judge_max_tokens: int = Field(default=160, ge=16)
        parallel_generations: int = Field(default=1, ge=1)
        seed: int = 0

    def __init__(self, config: Config, environment: Environment) -> None:
        self.config = config
        self._task = environment.task
        self._executor = environment.executor
        self._encoder = environment.encoder
        self._miss_path = MissPath(config, environment)
        prompts = files("methods") / "prompts"
        self._generate_prompt = (prompts / "gencache_generate.txt").read_text(encoding="utf-8").strip()
        self._judge_prompt = (prompts / "gencache_judge.txt").read_text(encoding="utf-8").strip()
        self._turn = asyncio.Semaphore(config.parallel_generations)
        self._clock = 0
        self.reset()

    @staticmethod
    def roles(config: Config) -> tuple[Role, ...]:
        """Return the target, and the engine of the miss path."""
        return ("target",) if config.engine == "target" else ("target", "small")

    # A request ---------------------------------------------------------------------------------------------

    async def reply(self, request: ChatRequest, context: Context) -> Reply:
        """Answer by a cluster's program, or on the miss path."""
        if (why := bypass_reason(request)) is not None:
            reply, _ = await self._miss_path.solve(request, context, CacheEvent("miss", reason=why))
            return reply
        text = _prompt(request.messages)
        with context.trace.stage("embed"):
            (embedded,) = await self._encoder.embed([text])
        with context.trace.stage("route"):
            ranked = self._ranked(embedded.vector)
        nearest = ranked[0] if ranked else None
        shown: dict[str, Any] = {
            "route": {
                "cluster": nearest[0].id if nearest else None,
                "similarity": nearest[1] if nearest else None,
                "pieces": embedded.pieces,
                "read": embedded.read,
            }
        }
        similarity = nearest[1] if nearest else None
        reason, key = "no cluster yet", None
        candidates = ranked if self.config.lookup == "all" else ranked[:1]
        if nearest:
            key, reason = f"cluster-{nearest[0].id}", "the cluster has no program yet"
        for cluster, cosine in candidates:
            if cluster.entry is None:
                continue
            with context.trace.stage("execute"):
                answer, reason = await self._run(cluster.entry, text)
            shown |= {"entry": f"cluster-{cluster.id}", "lookup": reason}
            if answer is not None:
                context.commit({"op": "hit", "cluster": cluster.id})
                self._ask_for_feedback(cluster.id, cluster.entry, request, answer, context)
                cache = CacheEvent("program", f"cluster-{cluster.id}", cosine, reason="matched")
                return Reply(answer, cache, details=shown)
        cache = CacheEvent("miss", key=key, similarity=similarity, reason=reason)
        reply, stored = await self._miss_path.solve(request, context, cache)
        if stored is not None and not reply.tool_calls:
            shown["cluster"] = await self._insert(text, embedded.vector, reply, context)
        return replace(reply, details={**shown, **reply.details})

    def _ranked(self, vector: Vector) -> list[tuple[_Cluster, float]]:
        """Return the clusters with their prompts' cosines, nearest first."""
        if not self._clusters:
            return []
        scores = self._requests.scores(vector)
        order = (-scores).argsort(kind="stable")
        if self.config.lookup == "nearest":
            order = order[:1]
        return [(self._clusters[int(at)], float(min(1, max(-1, scores[at])))) for at in order]

    async def _run(self, entry: _Entry, text: str) -> tuple[str | None, str]:
        """Return what a program answers, and why it gives no answer."""
        result = await self._executor.run(
            entry.code + _RUN, arguments={"pattern": entry.pattern, "request": text}
        )
        if result.status == "executor_error":
            raise ExecutorFailed(f"the program executor failed: {result.error}")
        if result.status != "ok" or not isinstance(result.value, list):
            return None, f"program {result.status}" + (f": {result.error}" if result.error else "")
        matched, answer = result.value
        if not matched:
            return None, "the expression does not match"
        if answer is None or not answer.strip():
            return None, "the program gives nothing"
        return answer, "matched"

    async def _insert(self, text: str, vector: Vector, reply: Reply, context: Context) -> int:
        """Make a clean miss an exemplar of the cluster that fits both ways, or of a new one."""
        with context.trace.stage("embed response"):
            response = await self._response_vector(reply.text)
        cluster = self._fitting(vector, response)
        exemplar = _Exemplar(text, reply.text, pack_vector(vector), pack_vector(response))
        context.commit({"op": "insert", "cluster": cluster, "exemplar": asdict(exemplar)})
        if cluster is None:
            cluster = len(self._clusters) - 1
        self._maybe_generate(cluster, context)
        return cluster

    async def _response_vector(self, response: str) -> Vector:
        """Return the embedding of a response: of each value, in the mean, where it is a JSON object."""
        try:
            data = json.loads(response)
        except (ValueError, RecursionError):
            data = None
        texts = [str(value) for value in data.values()] if isinstance(data, dict) and data else [response]
        vectors = [one.vector for one in await self._encoder.embed(texts)]
        total = sum(vectors[1:], start=vectors[0])
        mean: Vector = total / max(float((total @ total) ** 0.5), 1e-12)
        return mean

    def _fitting(self, request: Vector, response: Vector) -> int | None:
        """Return the cluster above both thresholds with the highest sum of cosines."""
        if not self._clusters:
            return None
        asked, answered = self._requests.scores(request), self._responses.scores(response)
        fits = (asked > self.config.request_threshold) & (answered > self.config.response_threshold)
        if not fits.any():
            return None
        return int((asked + answered - 1e3 * ~fits).argmax())

    def _ask_for_feedback(
        self, number: int, entry: _Entry, request: ChatRequest, answer: str, context: Context
    ) -> None:
        draw = random.Random(f"{self.config.seed}/{_prompt(request.messages)}").random()
        if not self.config.feedback or draw >= self.config.feedback_share:
            return

        async def compare(own: Context) -> Mapping[str, Any]:
            reply, stored = await self._miss_path.solve(request, own, CacheEvent("none"))
            same = stored is None or self._task.same_answer(answer, reply.text)
            if not same and self._clusters[number].entry == entry:
                own.commit({"op": "delete", "cluster": number, "reason": "a hit was not the target's answer"})
            return {"cluster": number, "hit": answer, "target": reply.text, "same": same}

        context.background("feedback", compare)

    # A generation ------------------------------------------------------------------------------------------

    def _maybe_generate(self, number: int, context: Context) -> None:
        cluster = self._clusters[number]
        due = (
            cluster.entry is None
            and len(cluster.exemplars) >= self.config.nu
            and cluster.skip == 0
            and cluster.generations < self.config.cap
        )
        if due and number not in self._generating:
            self._generating.add(number)
            context.background("generate", lambda own: self._generate(number, own))

    async def _generate(self, number: int, context: Context) -> Mapping[str, Any]:
        try:
            async with self._turn:
                return await self._attempts(self._clusters[number], context)
        finally:
            self._generating.discard(number)

    async def _attempts(self, cluster: _Cluster, context: Context) -> Mapping[str, Any]:
        exemplars = tuple(cluster.exemplars)
        tries: list[dict[str, Any]] = []
        reason = cluster.reason
        for attempt in range(self.config.attempts):
            if attempt:
                reason = None  # each attempt begins afresh; its rounds learn from one another
            for round_ in range(self.config.rounds):
                if cluster.generations + len(tries) >= self.config.cap:
                    break
                tried: dict[str, Any] = {"attempt": attempt + 1, "round": round_ + 1}
                tries.append(tried)
                try:
                    entry = await self._write(exemplars, reason, len(tries) - 1, context)
                    tried |= {"pattern": entry.pattern, "program": entry.code}
                    verdicts, reason = await self._judge(entry, exemplars, context)
                except _Unusable as error:
                    reason = tried["unusable"] = str(error)
                    continue
                tried |= {"judged": verdicts, "reason": reason}
                if sum(verdicts) >= self.config.gamma * len(verdicts):
                    failing = [
                        asdict(one) for one, right in zip(exemplars, verdicts, strict=True) if not right
                    ]
                    context.commit(
                        {
                            "op": "install",
                            "cluster": cluster.id,
                            "entry": asdict(entry),
                            "attempted": len(tries),
                            "moved": failing,
                        }
                    )
                    return self._outcome(cluster, "accepted", tries)
        context.commit({"op": "failed", "cluster": cluster.id, "attempted": len(tries), "reason": reason})
        return self._outcome(cluster, "rejected", tries)

    @staticmethod
    def _outcome(cluster: _Cluster, outcome: str, tries: list[dict[str, Any]]) -> Mapping[str, Any]:
        return {
            "cluster": cluster.id,
            "outcome": outcome,
            "attempted": len(tries),
            "accepted": int(outcome == "accepted"),
            "attempts": tries,
        }

    async def _write(
        self, exemplars: Sequence[_Exemplar], reason: str | None, written: int, context: Context
    ) -> _Entry:
        """Return the program that the target writes.

        Raises:
            _Unusable: It wrote none, or its expression matches too few of the exemplars.
        """
        shown = exemplars[-self.config.nu :]
        parts = []
        cut = _shared_beginning([one.request for one in exemplars])
        if cut:
            parts.append("All requests begin with the same text. It is left out here and needs no pattern.")
        for number, one in enumerate(shown, start=1):
            parts += [f"Request {number}: {one.request[cut:]}", f"Response {number}: {one.response}"]
        for number, (one, other) in enumerate(zip(shown, shown[1:], strict=False), start=1):
            parts.append(f"From request {number} to {number + 1}: {_differences(one.request, other.request)}")
        skeleton = _skeleton([one.request[cut:] for one in shown])
        if reason:
            parts.append(f"An earlier version failed: {reason}")
        parts.append(f"What all of them share, for PATTERN: {skeleton}")
        messages: list[Message] = [
            {"role": "system", "content": self._generate_prompt},
            {"role": "user", "content": "\n".join(parts)},
        ]
        sampled = {"temperature": self.config.temperature, "seed": self.config.seed + written}
        with context.trace.stage("generate"):
            completion = await context.target.chat(
                messages,
                purpose="generate",
                params={
                    **(sampled if written else {"temperature": 0}),
                    "max_tokens": self.config.generation_max_tokens,
                    "stop": list(self.config.stop),
                },
            )
        entry = _read_entry(completion.text, truncated=completion.finish_reason == "length")
        result = await self._executor.run(
            _MATCH, arguments={"pattern": entry.pattern, "requests": [one.request for one in exemplars]}
        )
        if result.status == "executor_error":
            raise ExecutorFailed(f"the program executor failed: {result.error}")
        if result.status != "ok" or not isinstance(result.value, list):
            raise _Unusable(f"PATTERN can't be matched: {result.error or result.status}")
        matched = sum(bool(one) for one in result.value)
        if matched < min(self.config.nu, len(exemplars)):
            first = next(one.request for one, fits in zip(exemplars, result.value, strict=True) if not fits)
            raise _Unusable(
                f"PATTERN was {entry.pattern}\nIt does not match this request: {first[cut : cut + 300]}\n"
                "It must hold no word that not all requests share."
            )
        return entry

    async def _judge(
        self, entry: _Entry, exemplars: Sequence[_Exemplar], context: Context
    ) -> tuple[list[int], str | None]:
        """Run a program on the exemplars and let the target compare what it gives.

        Returns:
            1 or 0 per exemplar, and what was wrong.
        """
        outputs = [await self._run(entry, one.request) for one in exemplars]
        parts = []
        for number, (one, (output, why)) in enumerate(zip(exemplars, outputs, strict=True), start=1):
            given = f"({why})" if output is None else output
            parts += [f"Request {number}: {one.request}", f"Expected {number}: {one.response}"]
            parts.append(f"Output {number}: {given}")
        schema = {
            "type": "object",
            "properties": {
                "verdicts": {
                    "type": "array",
                    "items": {"enum": [0, 1]},
                    "minItems": len(exemplars),
                    "maxItems": len(exemplars),
                },
                "reason": {"type": "string", "maxLength": 300},
            },
            "required": ["verdicts", "reason"],
            "additionalProperties": False,
        }
        messages: list[Message] = [
            {"role": "system", "content": self._judge_prompt},
            {"role": "user", "content": "\n".join(parts)},
        ]
        with context.trace.stage("validate"):
            completion = await context.target.chat(
                messages,
                purpose="validate",
                params={
                    "temperature": 0,
                    "max_tokens": self.config.judge_max_tokens,
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "judgement", "schema": schema},
                    },
                },
            )
        verdicts, reason = _read_judgement(completion.text, len(exemplars))
        # No judge makes an answer out of none.
        verdicts = [
            int(right and output is not None) for right, (output, _) in zip(verdicts, outputs, strict=True)
        ]
        if not reason:
            wrong = [why for output, why in outputs if output is None]
            reason = wrong[0] if wrong else None
        return verdicts, reason

    # State -------------------------------------------------------------------------------------------------

    def apply(self, event: StateEvent) -> None:
        """Change the clusters; see :class:`bench.method.Stateful`."""
        operations = {
            "insert": self._apply_insert,
            "hit": self._apply_hit,
            "install": self._apply_install,
            "failed": self._apply_failed,
            "delete": self._apply_delete,
            "restore": self._apply_restore,
        }
        if event["op"] not in operations:
            raise ValueError(f"no such change: {event['op']!r}")
        operations[event["op"]](event)

    def _apply_insert(self, event: StateEvent) -> None:
        exemplar = _Exemplar(**event["exemplar"])
        if event["cluster"] is None:
            cluster = self._open(exemplar)
        else:
            cluster = self._clusters[event["cluster"]]
            self._requests.update(cluster.id, unpack_vector(exemplar.request_vector))
            self._responses.update(cluster.id, unpack_vector(exemplar.response_vector))
        cluster.exemplars.append(exemplar)
        del cluster.exemplars[: -self.config.nu * self.config.exemplars_per_nu]
        cluster.skip = max(0, cluster.skip - 1)
        self._touch(cluster)
        self._evict(cluster)

    def _open(self, exemplar: _Exemplar) -> _Cluster:
        cluster = _Cluster(self._requests.add(unpack_vector(exemplar.request_vector)))
        self._responses.add(unpack_vector(exemplar.response_vector))
        self._clusters.append(cluster)
        return cluster

    def _apply_hit(self, event: StateEvent) -> None:
        cluster = self._clusters[event["cluster"]]
        cluster.hits += 1
        self._touch(cluster)

    def _apply_install(self, event: StateEvent) -> None:
        cluster = self._clusters[event["cluster"]]
        cluster.entry = _Entry(**event["entry"])
        cluster.generations += event["attempted"]
        cluster.attempted += event["attempted"]
        cluster.accepted += 1
        cluster.reason = None
        moved = [_Exemplar(**one) for one in event["moved"]]
        if moved:
            cluster.exemplars = [one for one in cluster.exemplars if one not in moved]
            fresh = self._open(moved[0])
            fresh.exemplars = moved
            for exemplar in moved[1:]:
                self._requests.update(fresh.id, unpack_vector(exemplar.request_vector))
                self._responses.update(fresh.id, unpack_vector(exemplar.response_vector))
            self._touch(fresh)
        self._touch(cluster)
        self._evict(cluster)

    def _apply_failed(self, event: StateEvent) -> None:
        cluster = self._clusters[event["cluster"]]
        cluster.generations += event["attempted"]
        cluster.attempted += event["attempted"]
        cluster.skip = self.config.skip
        cluster.reason = event["reason"]

    def _apply_delete(self, event: StateEvent) -> None:
        cluster = self._clusters[event["cluster"]]
        cluster.entry = None
        cluster.reason = event["reason"]

    def _apply_restore(self, event: StateEvent) -> None:
        data = dict(event["state"])
        data["exemplars"] = [_Exemplar(**one) for one in data["exemplars"]]
        data["entry"] = _Entry(**data["entry"]) if data["entry"] else None
        row = self._requests.restore(unpack_vector(event["requests"]), event["count"])
        self._responses.restore(unpack_vector(event["responses"]), event["count"])
        self._clusters.append(_Cluster(id=row, **data))
        self._clock = max(self._clock, self._clusters[-1].used)

    def _touch(self, cluster: _Cluster) -> None:
        self._clock += 1
        cluster.used = self._clock

    def _evict(self, keep: _Cluster) -> None:
        """Drop exemplars and programs of the least recently used clusters beyond the limits."""
        others = sorted((one for one in self._clusters if one is not keep), key=lambda one: one.used)
        size = sum(one.size for cluster in self._clusters for one in cluster.exemplars)
        for cluster in others:
            if size <= self.config.exemplar_bytes:
                break
            size -= sum(one.size for one in cluster.exemplars)
            cluster.exemplars = []
        size = sum(cluster.entry.size for cluster in self._clusters if cluster.entry)
        for cluster in others:
            if size <= self.config.program_bytes:
                break
            if cluster.entry:
                size -= cluster.entry.size
                cluster.entry = None

    def reset(self) -> None:
        """Forget every cluster."""
        self._requests = CentroidIndex(self._encoder.dimensions)
        self._responses = CentroidIndex(self._encoder.dimensions)
        self._clusters: list[_Cluster] = []
        self._generating: set[int] = set()
        self._clock = 0

    def snapshot(self) -> Iterator[StateEvent]:
        """Yield one event per cluster that brings it back as it is."""
        for cluster in self._clusters:
            state = asdict(cluster)
            del state["id"]
            yield {
                "op": "restore",
                "requests": pack_vector(self._requests.total(cluster.id)),
                "responses": pack_vector(self._responses.total(cluster.id)),
                "count": self._requests.count(cluster.id),
                "state": state,
            }

    def stats(self) -> Mapping[str, int | float | str]:
        """Return the numbers of clusters, programs, exemplars, generations and hits."""
        return {
            "clusters": len(self._clusters),
            "entries": sum(cluster.entry is not None for cluster in self._clusters),
            "exemplars": sum(len(cluster.exemplars) for cluster in self._clusters),
            "generating": len(self._generating),
            "attempted": sum(cluster.attempted for cluster in self._clusters),
            "accepted": sum(cluster.accepted for cluster in self._clusters),
            "hits": sum(cluster.hits for cluster in self._clusters),
        }

    def describe(self) -> Mapping[str, Any]:
        """Return every cluster with its program; see :class:`bench.method.Describable`."""
        return {
            "clusters": [
                {
                    "cluster": cluster.id,
                    "exemplars": [one.request for one in cluster.exemplars],
                    "entries_attempted": cluster.attempted,
                    "entries_accepted": cluster.accepted,
                    "hits": cluster.hits,
                    "insertions_to_skip": cluster.skip,
                    "last_failure": cluster.reason,
                    "entry": asdict(cluster.entry) if cluster.entry else None,
                }
                for cluster in self._clusters
            ]
        }


def _prompt(messages: Sequence[Message]) -> str:
    """Return the whole prompt, instructions included: they make requests of one kind alike."""
    return "\n".join(text_of(message) for message in messages)


def _shared_beginning(requests: Sequence[str]) -> int:
    """Return how many characters of instructions, whole lines or sentences, all requests begin with."""
    shared = os.path.commonprefix(list(requests))
    ends = [match.end() for match in _END.finditer(shared)]
    return ends[-1] if ends and ends[-1] >= _LEAST_SHARED else 0


def _skeleton(requests: Sequence[str]) -> str:
    """Return the tokens that all requests have in the same order, with an ellipsis where they differ."""
    shared = [(False, token) for token in _TOKEN.findall(requests[0])]  # with whether a gap is before it
    tail = False
    for request in requests[1:]:
        known = [token for _, token in shared]
        matcher = difflib.SequenceMatcher(None, known, _TOKEN.findall(request), autojunk=False)
        kept: list[tuple[bool, str]] = []
        gap = False
        for kind, start, end, _, _ in matcher.get_opcodes():
            if kind == "equal":
                before, token = shared[start]
                kept += [(gap or before, token), *shared[start + 1 : end]]
            gap = kind != "equal"
        shared, tail = kept, tail or gap
    text = "".join(("..." if gap else "") + token for gap, token in [*shared, (tail, "")])
    return _GAPS.sub("...", text).strip() or "nothing"


def _differences(one: str, other: str) -> str:
    """Return which words change from one request to the next."""
    before, after = one.split(), other.split()
    changes = [
        f"{' '.join(before[a:b]) or '(nothing)'} -> {' '.join(after[c:d]) or '(nothing)'}"
        for kind, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        if kind != "equal"
    ]
    return "; ".join(changes) or "nothing"


def _read_entry(reply: str, *, truncated: bool) -> _Entry:
    code = extract_program(reply, truncated=truncated)
    if code is None:
        raise _Unusable("the reply holds no Python block")
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _Unusable(f"the program does not parse: {error}") from error
    pattern = next(
        (
            node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "PATTERN"
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ),
        None,
    )
    if pattern is None:
        raise _Unusable("the reply assigns no PATTERN")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise _Unusable(f"PATTERN is no regular expression: {error}") from error
    wanted = ast.Import | ast.ImportFrom | ast.Assign | ast.FunctionDef
    kept: list[ast.stmt] = [node for node in tree.body if isinstance(node, wanted)]
    if not any(isinstance(node, ast.FunctionDef) and node.name == "solve" for node in kept):
        raise _Unusable("the reply defines no function `solve`")
    body = ast.unparse(ast.Module(kept, []))
    return _Entry(pattern, f"import re\n{body}\n")


def _read_judgement(text: str, n: int) -> tuple[list[int], str | None]:
    """Return the verdicts and the reason; a judgement that can't be read says no."""
    try:
        told = json.loads(text)
        verdicts = [int(bool(one)) for one in told["verdicts"]]
        reason = str(told.get("reason") or "").strip() or None
    except (ValueError, KeyError, TypeError, AttributeError):
        found = re.search(r"\[([01,\s]+)\]", text)
        verdicts = [int(one) for one in re.findall(r"[01]", found[1])] if found else []
        reason = None
    if len(verdicts) != n:
        return [0] * n, reason or "the judgement could not be read"
    return verdicts, reason
