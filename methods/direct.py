"""Direct: the request goes to the engine unchanged, and its reply is the answer."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from bench.engine import EngineClient, Role
from bench.method import CacheEvent, ChatRequest, Context, Environment, Reply

__all__ = ["Direct", "answer_directly"]


class Direct:
    """The baseline without reuse (MiniCache, section 4.1)."""

    class Config(BaseModel):
        """Settings of Direct.

        Attributes:
            engine: Which engine of the pair answers.
        """

        model_config = ConfigDict(extra="forbid", frozen=True)
        engine: Role = "target"

    def __init__(self, config: Config, environment: Environment) -> None:
        self.config = config

    @staticmethod
    def roles(config: Config) -> tuple[Role, ...]:
        """Return the engine that the settings name."""
        return (config.engine,)

    async def reply(self, request: ChatRequest, context: Context) -> Reply:
        """Pass the request on and its reply back, streaming."""
        return await answer_directly(request, context, getattr(context, self.config.engine))


async def answer_directly(
    request: ChatRequest, context: Context, engine: EngineClient, cache: CacheEvent | None = None
) -> Reply:
    """Answer with one unchanged call to ``engine``; the miss path of tasks where no program is natural."""
    with context.trace.stage("answer"):
        completion = await engine.chat(
            request.messages, purpose="answer", params=request.params, emit=context.emit
        )
    return Reply.of(completion, cache or CacheEvent("none"))
