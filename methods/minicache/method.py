"""MiniCache: a hit is a cached program with the variables that the small model finds in the request."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from bench.engine import Role
from bench.errors import ExecutorFailed
from bench.method import CacheEvent, ChatRequest, Context, Environment, Reply, StateEvent
from bench.samples import Message
from methods.minicache.alignment import align, run_program
from methods.minicache.antiunify import shape_of, shared_program
from methods.minicache.generation import (
    Entry,
    Exemplar,
    Unusable,
    generation_messages,
    read_entry,
    reflection_messages,
)
from methods.minicache.groups import Group, Groups
from methods.minicache.roles import Roles
from methods.minicache.template import Refused, Span, Values, spans_of
from methods.misspath import MissPath
from methods.pot import PoTConfig, bypass_reason
from methods.routing import pack_vector

if TYPE_CHECKING:
    from bench.encoder import Vector

__all__ = ["MiniCache"]

_INVERTING = re.compile(
    r"\b(?:not|no|never|without|except|excluding|exclude[sd]?|before|after|minus|less|ignoring|instead)\b|n['’]t\b",
    re.IGNORECASE,
)
_FIND = """
import re
def solve(pattern, text):
    match = re.search(pattern, text)
    return match.groupdict() if match else None
"""


@dataclass(frozen=True, slots=True)
class _Route:
    """Where a request belongs.

    Attributes:
        vector: Its embedding.
        group: Number of the nearest group; None where none is near enough.
        similarity: Cosine with the nearest group's centroid; None where there is no group.
        pieces, read: Word pieces of the request's views, and how many of them the vector stands for.
    """

    vector: Vector
    group: int | None
    similarity: float | None
    pieces: int
    read: int


class MiniCache:
    """Program cache whose variables a small model extracts (MiniCache, section 3).

    A request is routed to the group with the nearest centroid. Where the group has an entry (T, P), the small
    model fills in T, the values are checked against the request, and P computes the answer: a hit without a
    call to the target. Everything else takes the miss path (PoT where a program is natural), and its clean
    replies become exemplars, from which the target writes entries in the background; an entry is installed
    when it gives the exemplars' own answers. No gold label is used anywhere.

    A request that asks for more than plain text (tools, a schema, images), or that is part of a conversation,
    takes the miss path and is not kept. Groups are kept apart by model and system prompt.
    """

    needs_encoder = True

    class Config(PoTConfig):
        """Settings of MiniCache, with those of its miss path.

        Attributes:
            tau: Cosine below which a request opens a new group (τ); None takes the task's.
            nu: Exemplars that trigger the first generation (ν; 3 in the authors' Formula runtime).
            alpha: Share of validated exemplars that an entry must answer as they were (α; 2/3 there).
            retries: Attempts per trigger (R).
            beta: ν grows by this factor after a failed trigger (β).
            triggers: Failed triggers after which a group is uncacheable (K; ours).
            max_exemplars: Exemplars that a group keeps (ours).
            generation_exemplars: How many of them the target is shown (ours: two show what varies).
            validation_exemplars: How many of them an entry is validated on (ours).
            generation_max_tokens: Cap on an entry, tokens.
            reflection_max_tokens: Cap on a failure summary, tokens.
            extraction_max_tokens: Cap on an extraction, tokens.
            parallel_generations: Groups whose entries are made at the same time; others wait (ours).
            make: Who writes entries: ``target``, or ``antiunify`` (ours), which merges the exemplars'
                programs and asks the target only where they have too little in common.
            extraction: Who finds the variables: the ``small`` model, or a ``pattern``, a regular expression
                that the target writes with the entry (the ablation without a small model).
            choices: What the small model may choose from for a number. ``all``: every value of the request.
                ``fitting`` (ours): those whose words around them fit the variable, for the encoder; where
                that leaves several, the small model must choose the best one, or the request is refused.
            margin: How much worse than the best assignment of values to variables another must be for
                ``fitting`` to rule it out, in summed similarity (ours).
            ask: Ask the small model ``always``, or only where the choices leave something ``open``: a schema
                that allows a single answer has it already, and decoding what a grammar forces is wasted
                (some engines jump over it; ours does not). Both give the same answers.
            shots: Solved requests shown to the small model (ours).
            learn: Whether a request whose values were unclear, and which the miss path then answered, shows
                an entry what its variables are called (ours): where the encoder's best guess gives the same
                answer. Costs no engine call.
            validation: Whether entries are validated before they are installed.
            reflection: Whether failures are summarised for the next attempt.
            grouping: Requests are grouped by ``embedding``, or by the ``template`` that the request names
                (an upper bound for routing).
            split: Whether a group whose exemplars need two programs becomes two (ours).
            quarantine_after: An entry is dropped after so many refused extractions in a row; None never
                (a guardrail of ours, as the next two).
            shadow_share: Share of hits that the target answers too, in the background; an entry that
                disagrees is dropped.
            guard_wording: Refuse hits for requests whose negations (not, without, before, …) no exemplar has.
            seed: Seeds the choice of exemplars and of shadowed hits.
        """

        tau: float | None = Field(default=None, ge=-1, le=1)
        nu: int = Field(default=3, ge=1)
        alpha: float = Field(default=2 / 3, gt=0, le=1)
        retries: int = Field(default=3, ge=1)
        beta: float = Field(default=2, ge=1)
        triggers: int = Field(default=3, ge=1)
        max_exemplars: int = Field(default=12, ge=1)
        generation_exemplars: int = Field(default=2, ge=1)
        validation_exemplars: int = Field(default=6, ge=1)
        generation_max_tokens: int = Field(default=400, ge=16)
        reflection_max_tokens: int = Field(default=80, ge=16)
        extraction_max_tokens: int = Field(default=200, ge=8)
        parallel_generations: int = Field(default=1, ge=1)
        make: Literal["target", "antiunify"] = "target"
        extraction: Literal["small", "pattern"] = "small"
        choices: Literal["fitting", "all"] = "fitting"
        margin: float = Field(default=0.05, ge=0)
        ask: Literal["always", "open"] = "open"
        shots: int = Field(default=0, ge=0)
        learn: bool = True
        validation: bool = True
        reflection: bool = True
        grouping: Literal["embedding", "template"] = "embedding"
        split: bool = True
        quarantine_after: int | None = Field(default=None, ge=1)
        shadow_share: float = Field(default=0, ge=0, le=1)
        guard_wording: bool = False
        seed: int = 0

    def __init__(self, config: Config, environment: Environment) -> None:
        self.config = config
        self._task = environment.task
        self._executor = environment.executor
        self._encoder = environment.encoder
        self._miss_path = MissPath(config, environment)
        self._tau = self._task.similarity_threshold if config.tau is None else config.tau
        self._groups = Groups(
            self._encoder.dimensions,
            nu=config.nu,
            beta=config.beta,
            most_triggers=config.triggers,
            most_exemplars=config.max_exemplars,
        )
        self._roles = Roles(self._encoder, config.margin)
        self._turn = asyncio.Semaphore(config.parallel_generations)
        self._generating: set[int] = set()
        self._bypassed = 0
        prompt = files("methods") / "prompts" / "minicache_extract_system.txt"
        self._extract = prompt.read_text(encoding="utf-8").strip()

    @staticmethod
    def roles(config: Config) -> tuple[Role, ...]:
        """Return the target, which generates entries, and the small engine where it extracts."""
        return ("target", "small") if config.extraction == "small" else ("target",)

    # A request ---------------------------------------------------------------------------------------------

    async def reply(self, request: ChatRequest, context: Context) -> Reply:
        """Answer from the group's cached program, or on the miss path."""
        if (why := bypass_reason(request)) is not None:
            self._bypassed += 1
            reply, _ = await self._miss_path.solve(request, context, CacheEvent("miss", reason=why))
            return reply
        text = self._task.instruction(request.messages)
        route = await self._route(request, context)
        shown: dict[str, Any] = {
            "route": {
                "group": route.group,
                "similarity": route.similarity,
                "new": route.group is None,
                "pieces": route.pieces,
                "read": route.read,
            }
        }
        key, reason = None, f"no group at cosine {self._tau:g}: a new one"
        refused_by: Entry | None = None
        if route.group is not None:
            group = self._groups.all[route.group]
            entry = group.entry
            key = f"group-{group.id}"
            reason = "the group is uncacheable" if group.uncacheable else "the group has no entry yet"
            if entry is not None:
                shown["entry"] = entry.id
                try:
                    answer, found = await self._hit(entry, group, text, context)
                except Refused as refused:
                    refused_by = entry
                    reason = f"refused: {refused}"
                    shown["refused"] = str(refused)
                    if self._has(group):
                        self._note_refusal(group.id, entry, reason, context)
                else:
                    shown |= found
                    if self._has(group):
                        context.commit({"op": "hit", "group": group.id, "vector": pack_vector(route.vector)})
                        self._shadow(group.id, entry, request, answer, context)
                    cache = CacheEvent("program", key=entry.id, similarity=route.similarity, reason="entry")
                    return Reply(answer, cache, details=shown)
        cache = CacheEvent("miss", key=key, similarity=route.similarity, reason=reason)
        reply, stored = await self._miss_path.solve(request, context, cache)
        if stored is not None and not reply.tool_calls:
            shown["group"], exemplar = self._keep(request, route, text, reply, context)
            if refused_by is not None:
                self._learn(shown["group"], refused_by, exemplar, context)
        return replace(reply, details={**shown, **reply.details})

    async def _route(self, request: ChatRequest, context: Context) -> _Route:
        views = list(self._task.views(request.messages))
        with context.trace.stage("embed"):
            embeddings = await self._encoder.embed([text for text, _ in views])
        with context.trace.stage("route"):
            import numpy as np

            mixed = np.sum(
                [weight * one.vector for one, (_, weight) in zip(embeddings, views, strict=True)], axis=0
            )
            vector: Vector = (mixed / max(float(np.linalg.norm(mixed)), 1e-12)).astype(np.float32)
            group, similarity = self._find(request, vector)
        return _Route(
            vector,
            group,
            similarity,
            sum(one.pieces for one in embeddings),
            sum(one.read for one in embeddings),
        )

    def _find(self, request: ChatRequest, vector: Vector) -> tuple[int | None, float | None]:
        scope = _scope(request)
        if self.config.grouping == "template":
            name = self._task.template_key(request.messages)
            return self._groups.by_key.get(f"{scope}/{name}"), None
        nearest = self._groups.nearest(vector, scope)
        if nearest is None:
            return None, None
        group, similarity = nearest
        return (group if similarity >= self._tau else None), similarity

    def _has(self, group: Group) -> bool:
        """Tell whether the state still has a group: it may have been emptied while the small model worked."""
        return group.id < len(self._groups.all) and self._groups.all[group.id] is group

    async def _hit(
        self, entry: Entry, group: Group, text: str, context: Context
    ) -> tuple[str, dict[str, Any]]:
        """Return the answer and what was extracted.

        Raises:
            Refused: The request does not fit the entry, or its values can't be used.
        """
        if self.config.guard_wording:
            known = {word for one in group.exemplars for word in _inversions(one.request)}
            if strange := sorted(_inversions(text) - known):
                raise Refused(f"wording that no exemplar has: {', '.join(strange)}")
        with context.trace.stage("extract"):
            values, found = await self._values(entry, entry.shots, text, context, validating=False)
        with context.trace.stage("execute"):
            answer = await run_program(self._executor, self._task, entry.code, values)
        return answer, found

    async def _values(
        self,
        entry: Entry,
        shots: Sequence[tuple[str, Mapping[str, str]]],
        text: str,
        context: Context,
        *,
        validating: bool,
    ) -> tuple[Values, dict[str, Any]]:
        """Return the program's arguments, and facts about how they were found.

        Raises:
            Refused: They could not be found, or may not be used.
        """
        spans = spans_of(text)
        if entry.pattern is not None:
            answer = await self._match(entry.pattern, text)
            return entry.template.bind(answer, text, spans), {"extraction": answer}
        entry.template.schema(spans)  # refuses a request with too few values before anything is asked
        fitting = None
        if self.config.choices == "fitting" and entry.template.numbers:
            with context.trace.stage("roles"):
                fitting = await self._roles.assignment(entry.template.numbers, shots, text)
        best = {name: texts[0] for name, texts in (fitting or {}).items()}
        clear = fitting is not None and all(len(texts) == 1 for texts in fitting.values())
        found: dict[str, Any] = {"choices": "one" if clear else "all" if fitting is None else "some"}
        if clear and len(best) == len(entry.template.variables) and self.config.ask == "open":
            answer = json.dumps(best, ensure_ascii=False)
        else:
            completion = await context.small.chat(
                self._extraction_messages(entry, shots, text),
                purpose="validate" if validating else "extract",
                params={
                    "temperature": 0,
                    "max_tokens": self.config.extraction_max_tokens,
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "variables", "schema": entry.template.schema(spans, fitting)},
                    },
                },
            )
            answer = completion.text
            if completion.finish_reason == "length":
                raise Refused("the extraction was cut off")
        values = entry.template.bind(answer, text, spans)
        said = json.loads(answer)
        for name, written in best.items():
            if said[name] != written:
                raise Refused(f"{name}: {said[name]!r} was extracted, and {written!r} fits better")
        return values, {**found, "extraction": answer, "values": values}

    async def _match(self, pattern: str, text: str) -> str:
        result = await self._executor.run(_FIND, arguments={"pattern": pattern, "text": text})
        if result.status == "executor_error":
            raise ExecutorFailed(f"the program executor failed: {result.error}")
        if result.status != "ok" or not isinstance(result.value, dict):
            raise Refused(
                "the pattern does not match" if result.status == "ok" else f"pattern {result.status}"
            )
        return json.dumps(result.value, ensure_ascii=False)

    def _extraction_messages(
        self, entry: Entry, shots: Sequence[tuple[str, Mapping[str, str]]], text: str
    ) -> list[Message]:
        # What every request of the group shares comes first, so that the engine's prefix cache has it.
        system = self._extract.replace("{variables}", entry.template.instructions())
        messages: list[Message] = [{"role": "system", "content": system}]
        for request, values in shots[: self.config.shots]:
            answer = json.dumps(dict(values), ensure_ascii=False, separators=(",", ":"))
            messages += [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": text}]

    def _keep(
        self, request: ChatRequest, route: _Route, text: str, reply: Reply, context: Context
    ) -> tuple[int, Exemplar]:
        """Make a clean miss an exemplar of its group, and begin a generation where that is due."""
        # Others may have opened the group while the target worked.
        group, _ = self._find(request, route.vector)
        scope = _scope(request)
        name = self._task.template_key(request.messages) if self.config.grouping == "template" else None
        program = reply.details.get("program") if "fallback" not in reply.details else None
        exemplar = Exemplar(text, reply.text, program, pack_vector(route.vector))
        context.commit(
            {
                "op": "exemplar",
                "group": group,
                "scope": scope,
                "key": None if name is None else f"{scope}/{name}",
                "exemplar": asdict(exemplar),
            }
        )
        if group is None:
            group = len(self._groups.all) - 1
        self._maybe_generate(group, context)
        return group, exemplar

    def _learn(self, number: int, entry: Entry, exemplar: Exemplar, context: Context) -> None:
        """Let an entry see how a refused request, now answered, words its values."""
        by_words = self.config.learn and self.config.choices == "fitting" and entry.pattern is None
        if not by_words or len(entry.shots) >= self.config.max_exemplars:
            return

        async def compare(own: Context) -> Mapping[str, Any]:
            told: dict[str, Any] = {"group": number, "entry": entry.id, "learned": None}
            try:
                values = await align(self._executor, self._task, entry, exemplar, spans_of(exemplar.request))
            except Refused as refused:
                return {**told, "why": str(refused)}
            fitting = await self._roles.assignment(entry.template.numbers, entry.shots, exemplar.request)
            best = {name: texts[0] for name, texts in (fitting or {}).items()}
            if values is None or best != values:
                return {**told, "why": "the encoder's best guess does not give the answer"}
            if not _same(self._groups.all[number].entry, entry):
                return {**told, "why": "the entry is gone"}
            own.commit({"op": "learn", "group": number, "shot": [exemplar.request, dict(values)]})
            return {**told, "learned": dict(values)}

        context.background("learn", compare)

    def _note_refusal(self, number: int, entry: Entry, reason: str, context: Context) -> None:
        context.commit({"op": "refused", "group": number})
        group = self._groups.all[number]
        limit = self.config.quarantine_after
        if limit is not None and group.refused_in_a_row >= limit and _same(group.entry, entry):
            context.commit({"op": "evict", "group": number, "reason": f"quarantined: {reason}"})

    def _shadow(self, number: int, entry: Entry, request: ChatRequest, answer: str, context: Context) -> None:
        """Let the target answer a sampled hit too, and drop an entry that it disagrees with."""
        text = self._task.instruction(request.messages)
        draw = random.Random(f"{self.config.seed}/shadow/{number}/{text}").random()
        if draw >= self.config.shadow_share:
            return

        async def compare(own: Context) -> Mapping[str, Any]:
            reply, stored = await self._miss_path.solve(request, own, CacheEvent("none"))
            same = stored is None or self._task.same_answer(answer, reply.text)
            if not same and _same(self._groups.all[number].entry, entry):
                own.commit({"op": "evict", "group": number, "reason": "a shadowed hit was not the target's"})
            return {"group": number, "entry": entry.id, "hit": answer, "target": reply.text, "same": same}

        context.background("shadow", compare)

    # A generation ------------------------------------------------------------------------------------------

    def _maybe_generate(self, number: int, context: Context) -> None:
        group = self._groups.all[number]
        due = group.state == "open" and group.seen >= group.nu
        if due and number not in self._generating:
            self._generating.add(number)
            context.background("generate", lambda own: self._generate(number, own))

    async def _generate(self, number: int, context: Context) -> Mapping[str, Any]:
        """Make an entry for a group and install it, or note the failure (section 3.5)."""
        try:
            return await self._attempts(self._groups.all[number], context)
        finally:
            self._generating.discard(number)

    async def _attempts(self, group: Group, context: Context) -> Mapping[str, Any]:
        chance = random.Random(f"{self.config.seed}/{group.id}/{group.triggers}")
        attempts: list[dict[str, Any]] = []
        fresh: list[str] = []
        entry: Entry | None = None
        failures: list[str] = []
        for attempt in range(self.config.retries):
            # A turn is one attempt: other groups' first ones go before a second one.
            async with self._turn:
                if attempt and self.config.reflection:
                    fresh.append(await self._reflect(entry, failures, context))
                    attempts[-1]["summary"] = fresh[-1]
                attempts.append({"attempt": attempt + 1})
                entry, failures = await self._attempt(
                    group, [*group.summaries, *fresh], attempts[-1], attempt, chance, context
                )
            if entry is not None and not failures:
                context.commit(
                    {
                        "op": "install",
                        "group": group.id,
                        "entry": entry.to_json(),
                        "attempted": len(attempts),
                        "accepted": 1,
                        "summaries": fresh,
                    }
                )
                return self._outcome(group, "accepted", attempts, 1)
        moved = self._minority(group)
        change = {"group": group.id, "attempted": len(attempts), "accepted": 0, "summaries": fresh}
        if moved:
            context.commit({"op": "split", "moved": moved, **change})
            return self._outcome(group, "split", attempts, 0)
        context.commit({"op": "failed", **change})
        return self._outcome(group, "uncacheable" if group.uncacheable else "rejected", attempts, 0)

    async def _attempt(
        self,
        group: Group,
        summaries: Sequence[str],
        tried: dict[str, Any],
        attempt: int,
        chance: random.Random,
        context: Context,
    ) -> tuple[Entry | None, list[str]]:
        """Make one entry and validate it; ``tried`` is told what came of it.

        Returns:
            The entry, and why it may not be installed: nothing where it may.
        """
        # Those of now: others may have come since the last attempt.
        exemplars = tuple(group.exemplars)
        spans = [spans_of(one.request) for one in exemplars]
        identifier = f"group-{group.id}/{group.entries + 1}"
        try:
            entry = await self._make(identifier, exemplars, spans, summaries, attempt, chance, context)
        except Unusable as error:
            tried["unusable"] = str(error)
            return None, [str(error)]
        tried |= {"made_by": entry.made_by, "entry": entry.to_json()}
        entry, passed, failures = await self._validated(entry, exemplars, spans, chance, context)
        tried |= {"passed": passed, "failures": failures}
        enough = sum(passed) >= self.config.alpha * len(passed) - 1e-9
        return entry, [] if enough or not self.config.validation else failures

    @staticmethod
    def _outcome(
        group: Group, outcome: str, attempts: Sequence[Mapping[str, Any]], accepted: int
    ) -> Mapping[str, Any]:
        return {
            "group": group.id,
            "outcome": outcome,
            "attempted": len(attempts),
            "accepted": accepted,
            "attempts": list(attempts),
        }

    async def _make(
        self,
        identifier: str,
        exemplars: Sequence[Exemplar],
        spans: Sequence[Sequence[Span]],
        summaries: Sequence[str],
        attempt: int,
        chance: random.Random,
        context: Context,
    ) -> Entry:
        """Return a new entry.

        Raises:
            Unusable: What the target wrote is none.
        """
        if self.config.make == "antiunify" and attempt == 0:
            shared = shared_program([one.program for one in exemplars], spans)
            if shared is not None:
                shots = tuple(
                    (exemplars[at].request, values)
                    for at, values in zip(shared.members, shared.shots, strict=True)
                )
                return Entry(identifier, shared.template, shared.code, shots, "antiunify")
        with_pattern = self.config.extraction == "pattern"
        # At first those whose programs agree: what one odd program computes is not what the group shares.
        shapes = self._shapes(exemplars, spans)
        agreeing = [exemplars[at] for at in max(shapes, key=len, default=[])]
        few = len(agreeing) < self.config.generation_exemplars
        pool = list(exemplars) if few or attempt else agreeing
        shown = chance.sample(pool, min(self.config.generation_exemplars, len(pool)))
        with context.trace.stage("generate"):
            completion = await context.target.chat(
                generation_messages(shown, summaries, with_pattern=with_pattern),
                purpose="generate",
                params={
                    "temperature": 0,
                    "max_tokens": self.config.generation_max_tokens,
                    "stop": list(self.config.stop),
                },
            )
        return read_entry(
            completion.text,
            identifier=identifier,
            truncated=completion.finish_reason == "length",
            with_pattern=with_pattern,
        )

    async def _validated(
        self,
        entry: Entry,
        exemplars: Sequence[Exemplar],
        spans: Sequence[Sequence[Span]],
        chance: random.Random,
        context: Context,
    ) -> tuple[Entry, list[bool], list[str]]:
        """Run an entry on exemplars; a pass is the exemplar's own answer.

        Returns:
            The entry with the shots of those that passed, whether each exemplar passed, and what went wrong
            with the others.
        """
        chosen = list(range(len(exemplars)))
        if len(chosen) > self.config.validation_exemplars:
            chosen = sorted(chance.sample(chosen, self.config.validation_exemplars))
        failures: dict[int, str] = {}
        shots = {request: values for request, values in entry.shots}
        with context.trace.stage("align"):
            for at in chosen if entry.pattern is None else ():
                exemplar = exemplars[at]
                try:
                    aligned = shots.get(exemplar.request) or await align(
                        self._executor, self._task, entry, exemplar, spans[at]
                    )
                    if aligned is not None:
                        shots[exemplar.request] = aligned
                except Refused as refused:
                    failures[at] = f"Request {at + 1}: {refused}"
        entry = replace(entry, shots=tuple(shots.items()))
        if not self.config.validation:
            return entry, [True] * len(chosen), list(failures.values())
        left = [at for at in chosen if at not in failures]
        if len(failures) <= (1 - self.config.alpha) * len(chosen) + 1e-9:  # else it has failed already
            with context.trace.stage("validate"):
                # Together: the small engine batches them.
                problems = await asyncio.gather(
                    *(self._problem(entry, exemplars[at], context) for at in left)
                )
            for at, problem in zip(left, problems, strict=True):
                if problem is not None:
                    failures[at] = f"Request {at + 1}: {problem}"
        # What a failed one took for its values must not teach what the variables are.
        failed = {exemplars[at].request for at in failures}
        entry = replace(entry, shots=tuple(shot for shot in entry.shots if shot[0] not in failed))
        return entry, [at not in failures for at in chosen], [failures[at] for at in sorted(failures)]

    async def _problem(self, entry: Entry, exemplar: Exemplar, context: Context) -> str | None:
        """Return how an entry fails to give an exemplar's own answer; None where it gives it."""
        # An exemplar's own values must not help to find them.
        others = [shot for shot in entry.shots if shot[0] != exemplar.request]
        try:
            values, _ = await self._values(entry, others, exemplar.request, context, validating=True)
            answer = await run_program(self._executor, self._task, entry.code, values)
        except Refused as refused:
            return str(refused)
        if self._task.same_answer(answer, exemplar.answer):
            return None
        return (
            f"{json.dumps(values, ensure_ascii=False)} gave {answer[:40]}, "
            f"and its answer is {exemplar.answer[:40]}"
        )

    async def _reflect(self, entry: Entry | None, failures: Sequence[str], context: Context) -> str:
        with context.trace.stage("reflect"):
            completion = await context.target.chat(
                reflection_messages(entry.code if entry else None, failures),
                purpose="reflect",
                params={"temperature": 0, "max_tokens": self.config.reflection_max_tokens},
            )
        return " ".join(completion.text.split()) or failures[0]

    @staticmethod
    def _shapes(exemplars: Sequence[Exemplar], spans: Sequence[Sequence[Span]]) -> list[list[int]]:
        """Return the positions of exemplars whose programs compute the same, set by set."""
        shapes: dict[str, list[int]] = {}
        for at, (exemplar, own) in enumerate(zip(exemplars, spans, strict=True)):
            shape = shape_of(exemplar.program, own) if exemplar.program else None
            if shape is not None:
                shapes.setdefault(shape, []).append(at)
        return list(shapes.values())

    def _minority(self, group: Group) -> list[int]:
        """Return the exemplars that need another program than the most do, if at least two agree on it.

        None where a split would not help: a template's name would never lead to the new group, and each
        split counts as a failed trigger, lest a group that keeps mixing requests is split for ever.
        """
        if not self.config.split or self.config.grouping == "template":
            return []
        if group.triggers + 1 >= self.config.triggers:
            return []
        # Those of now: others came, and old ones went, while the entry was written.
        spans = [spans_of(one.request) for one in group.exemplars]
        several = [found for found in self._shapes(group.exemplars, spans) if len(found) >= 2]
        several.sort(key=len, reverse=True)
        return several[1] if len(several) > 1 else []

    # State -------------------------------------------------------------------------------------------------

    def apply(self, event: StateEvent) -> None:
        """Change the groups; see :class:`bench.method.Stateful`."""
        self._groups.apply(event)

    def reset(self) -> None:
        """Forget every group, entry and count."""
        self._groups.reset()
        self._roles.forget()
        self._generating.clear()
        self._bypassed = 0

    def snapshot(self) -> Iterator[StateEvent]:
        """Yield one event per group."""
        return self._groups.snapshot()

    def stats(self) -> Mapping[str, int | float | str]:
        """Return the numbers of groups by state, of exemplars, entries made and accepted, and hits."""
        groups = self._groups.all
        return {
            "groups": len(groups),
            "entries": sum(group.entry is not None for group in groups),
            "uncacheable": sum(group.uncacheable for group in groups),
            "exemplars": sum(len(group.exemplars) for group in groups),
            "generating": len(self._generating),
            "attempted": sum(group.attempted for group in groups),
            "accepted": sum(group.accepted for group in groups),
            "hits": sum(group.hits for group in groups),
            "refused": sum(group.refused for group in groups),
            "bypassed": self._bypassed,
        }

    def describe(self) -> Mapping[str, Any]:
        """Return every group with its entry; see :class:`bench.method.Describable`."""
        return {"tau": self._tau, "groups": self._groups.describe()}


def _same(now: Entry | None, entry: Entry) -> bool:
    """Tell whether an entry is still in place; it may have learned since."""
    return now is not None and now.id == entry.id


def _scope(request: ChatRequest) -> str:
    """Return a digest of what makes equal texts different requests."""
    leading = [dict(message) for message in request.messages[:-1]]
    text = json.dumps([request.model, leading], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _inversions(text: str) -> set[str]:
    return {match.lower() for match in _INVERTING.findall(text)}
