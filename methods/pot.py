"""PoT: the target writes a program, isolation runs it, and its value is the answer."""

from __future__ import annotations

from importlib.resources import files

from pydantic import BaseModel, ConfigDict, Field

from bench.engine import Role
from bench.errors import ExecutorFailed
from bench.execution import ProgramResult
from bench.method import CacheEvent, ChatRequest, Context, Environment, Reply
from bench.samples import Message, last_user_text, text_of
from methods.direct import answer_directly
from methods.execution.extract import extract_program
from methods.execution.finish import finish_program

__all__ = ["PoT", "PoTConfig", "bypass_reason"]

_OUTPUT_FIELDS = frozenset({"tools", "functions", "response_format"})
"""Parameters that ask for something else than a plain answer; no program stands in for that."""


class PoTConfig(BaseModel):
    """Settings of PoT, shared by every method whose miss path is PoT.

    Attributes:
        engine: Which engine of the pair writes the program.
        max_tokens: Cap on the program, tokens (ours; the paper gives none).
        stop: Where the engine stops decoding: the fence that closes the program.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    engine: Role = "target"
    max_tokens: int = Field(default=512, ge=16)
    stop: tuple[str, ...] = ("\n```",)


class PoT:
    """Program of thought (MiniCache, section 4.1 and A.4; Chen et al. 2023).

    A reply without a program, or a program that does not parse, run or yield an answer, falls back to one
    Direct call, and the record says so. What a program can't answer (tools, schemas, images, a conversation
    that does not end with the user) goes to Direct at once.
    """

    Config = PoTConfig

    def __init__(self, config: PoTConfig, environment: Environment) -> None:
        self.config = config
        self._task = environment.task
        self._executor = environment.executor
        prompts = files("methods") / "prompts"
        self._system = (prompts / "pot_system.txt").read_text(encoding="utf-8").strip()
        self._user = (prompts / "pot_user.txt").read_text(encoding="utf-8").strip()

    @staticmethod
    def roles(config: PoTConfig) -> tuple[Role, ...]:
        """Return the engine that the settings name."""
        return (config.engine,)

    async def reply(self, request: ChatRequest, context: Context) -> Reply:
        """Answer by a program, or directly where that fails."""
        return await self.solve(request, context, CacheEvent("none"))

    async def solve(self, request: ChatRequest, context: Context, cache: CacheEvent) -> Reply:
        """Answer as PoT does, with ``cache`` as the reply's cache event."""
        engine = context.target if self.config.engine == "target" else context.small
        if not _asks_for_plain_text(request):
            return await answer_directly(request, context, engine, cache)
        # What bounds or cuts the answer does not bound or cut the program that computes it.
        params = {key: value for key, value in request.params.items() if key not in ("max_tokens", "stop")}
        params |= {"max_tokens": self.config.max_tokens, "stop": list(self.config.stop)}
        with context.trace.stage("program"):
            completion = await engine.chat(self._messages(request), purpose="program", params=params)
        code = extract_program(completion.text, truncated=completion.finish_reason == "length")
        failure = "the reply holds no program"
        status = None
        if code is not None:
            code = finish_program(code)
            with context.trace.stage("execute"):
                result = await self._executor.run(code)
            status = result.status
            answer, failure = self._answer(result)
            if answer is not None:
                return Reply(answer, cache, details={"program": code, "program_status": status})
        reply = await answer_directly(request, context, engine, cache)
        details = {
            **reply.details,
            "program": code,
            "program_status": status,
            "fallback": failure,
        }
        return Reply(reply.text, cache, reply.finish_reason, reply.tool_calls, details)

    def _answer(self, result: ProgramResult) -> tuple[str | None, str]:
        if result.status == "executor_error":
            raise ExecutorFailed(f"the program executor failed: {result.error}")
        if result.status != "ok":
            return None, f"{result.status}: {result.error}" if result.error else result.status
        try:
            return self._task.format_value(result.value), ""
        except ValueError as error:
            return None, f"unusable value: {error}"

    def _messages(self, request: ChatRequest) -> list[Message]:
        """Build the program prompt: the conversation before the last user message stays as it is."""
        leading = ("system", "developer")
        earlier = [message for message in request.messages[:-1] if message.get("role") not in leading]
        own = [text_of(message) for message in request.messages if message.get("role") in leading]
        system = "\n\n".join([self._system, *filter(None, own)])
        user = self._user.replace("{request}", last_user_text(request.messages))
        return [{"role": "system", "content": system}, *earlier, {"role": "user", "content": user}]


def _asks_for_plain_text(request: ChatRequest) -> bool:
    """Tell whether a request asks for a plain answer to a user's text; the prompt carries nothing else."""
    if any(request.params.get(name) for name in _OUTPUT_FIELDS):
        return False
    parts = (
        part
        for message in request.messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )
    return request.messages[-1].get("role") == "user" and all(part.get("type") == "text" for part in parts)


def bypass_reason(request: ChatRequest) -> str | None:
    """Return why a cache of answers to single texts has to leave a request alone; None where it need not."""
    if not _asks_for_plain_text(request):
        return "bypassed: more than plain text is asked for"
    roles = [message.get("role") for message in request.messages]
    if [role for role in roles if role not in ("system", "developer")] != ["user"]:
        return "bypassed: part of a conversation"
    return None
