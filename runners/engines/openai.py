"""Any server that speaks the OpenAI API: vLLM, llama.cpp, a gateway, a provider."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from bench.config import EngineConfig
from bench.errors import EngineUnavailable, UsageError, did_you_mean
from runners.engines.base import place
from runners.engines.control import Answer, request

__all__ = ["OpenAIEngine"]

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 10.0


class OpenAIEngine:
    """An engine that somebody else runs; we only check that it is there.

    Attributes:
        model: Model name sent with each request; the server's only one where none was configured.
            None before :meth:`start` in that case.
    """

    def __init__(self, config: EngineConfig, role: str) -> None:
        """Check the configuration.

        Raises:
            UsageError: The URL is missing or not one that we take.
        """
        self.config = config
        self.role = role
        self.url = _checked_url(config.url, role)
        self.model: str | None = config.model
        self._models: dict[str, dict[str, Any]] | None = None

    def headers(self) -> dict[str, str]:
        """Return the headers that each request needs; the key is read anew each time, never kept."""
        key = os.environ.get(self.config.api_key_env, "").strip()
        return {"Authorization": f"Bearer {key}"} if key else {}

    async def start(self, log_dir: Path) -> str:
        """Check that the server answers and, where no model is configured, take its only one.

        Raises:
            EngineUnavailable: It can't be reached, refuses the key, or the model isn't clear.
        """
        del log_dir  # the server is not ours: it keeps its own log
        try:
            answer = await request("GET", f"{self.url}/models", headers=self.headers(), timeout_s=_TIMEOUT_S)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            # ValueError: a key that can't be sent in a header; its text is not repeated.
            why = "the key can't be sent" if isinstance(error, ValueError) else str(error) or "no answer"
            raise EngineUnavailable(
                f"The {self.role} engine at {self.url} can't be reached: {why}. "
                "Start that server, or correct the engine's `url`."
            ) from (None if isinstance(error, ValueError) else error)
        self._models = self._listed(answer)
        self._choose_model()
        return self.url

    def _listed(self, answer: Answer) -> dict[str, dict[str, Any]] | None:
        """Return the models that the server lists by name, or None where it lists none at all."""
        status = answer.status
        if status in (401, 403):
            name = self.config.api_key_env
            raise EngineUnavailable(
                f"The {self.role} engine at {self.url} refuses access ({status}: {answer.said}). The key is "
                f"taken from the environment variable {name}, which is {self._key_state()}: set it to a "
                "valid key, or name another variable with `api_key_env`."
            )
        if status in (404, 405) and self.config.model:
            return None
        if status in (404, 405):
            raise EngineUnavailable(
                f"{self.url}/models answers {status}. Either `url` is wrong (it is the part before "
                "`/chat/completions`), or the server lists no models: then name one with "
                "the engine's `model`."
            )
        if status != 200:
            raise EngineUnavailable(
                f"The {self.role} engine at {self.url} answers {status}: {answer.said}. "
                "If it is still loading its model, try again in a while; else see its log."
            )
        try:
            return {str(entry["id"]): dict(entry) for entry in answer.body["data"]}
        except (TypeError, KeyError, ValueError) as error:
            raise EngineUnavailable(
                f"{self.url}/models is no list of models, so this is no OpenAI-compatible server. "
                "Correct the engine's `url`."
            ) from error

    def _choose_model(self) -> None:
        if self._models is None:
            return
        if self.config.model is None:
            if len(self._models) != 1:
                listed = ", ".join(sorted(self._models)[:20]) or "none"
                raise EngineUnavailable(
                    f"{self.url} lists {len(self._models)} models ({listed}): choose one with the "
                    f"{self.role} engine's `model`."
                )
            (self.model,) = self._models
        elif self.config.model not in self._models:
            # Gateways may serve more than they list, so this alone is no reason to stop.
            _LOG.warning(
                'The %s engine at %s does not list the model "%s".%s',
                self.role,
                self.url,
                self.config.model,
                did_you_mean(self.config.model, sorted(self._models)[:20]),
            )

    def _key_state(self) -> str:
        return "set" if self.headers() else "absent"

    async def probe(self) -> dict[str, Any]:
        """Return facts for ``run.json``; ``key`` says ``set`` or ``absent``, never more."""
        entry = (self._models or {}).get(self.model or "", {})
        return {
            "kind": "openai",
            "url": self.url,
            "model": self.model,
            "model_listed": bool(entry) if self._models is not None else None,
            "owned_by": entry.get("owned_by"),
            "context": entry.get("max_model_len"),
            "key": self._key_state(),
        }

    async def reset_cache(self) -> bool:
        """Clear vLLM's prefix cache; other servers have no such call.

        vLLM offers it where it runs with ``VLLM_SERVER_DEV_MODE=1``.
        """
        entry = (self._models or {}).get(self.model or "", {})
        if entry.get("owned_by") != "vllm":
            return False  # any other server's 200 would mean nothing
        root = self.url.removesuffix("/v1")
        try:
            answer = await request("POST", f"{root}/reset_prefix_cache", headers=self.headers())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnavailable(
                f"The {self.role} engine at {self.url} no longer answers: {error}. See its log."
            ) from error
        return answer.status == 200

    async def stop(self) -> None:
        """Do nothing: the server is not ours."""


def _checked_url(url: str | None, role: str) -> str:
    where = f"{place(role)}.url"
    if not url:
        raise UsageError(
            f"{where} is missing: an engine of kind openai needs its base URL, such as http://127.0.0.1:8000/v1."
        )
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{where} is not a URL: {error}.") from error
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            f"{where} has credentials in it, and runs record their URLs. Put the key into an environment "
            "variable and name that with `api_key_env`."
        )
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(
            f"{where} must begin with http:// or https:// and name a host, such as "
            f'http://127.0.0.1:8000/v1; got "{url}".'
        )
    if parts.query or parts.fragment:
        raise UsageError(f"{where} must end with /v1: leave out what follows ? or #.")
    clean = url.rstrip("/")
    if not parts.path.rstrip("/").endswith("/v1"):
        for ending in ("/chat/completions", "/completions", "/models", "/chat"):
            clean = clean.removesuffix(ending)
        hint = clean if clean.endswith("/v1") else f"{clean}/v1"
        raise UsageError(f'{where} must end with /v1; got "{url}". Did you mean "{hint}"?')
    return clean
