"""A service in front of a model, as a user runs it."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from bench.config import PairConfig, validate
from bench.registry import method_class, variant
from runners import encoder
from runners.pair import engines_of, start_pair
from runners.serve import build_service, free_socket, roles_of, server_config, task_of

__all__ = ["deploy"]


class _Server(uvicorn.Server):
    """Ends on SIGINT and SIGTERM as its base does, but leaves it at that.

    The base raises the signal again at its end, which would cut short the stopping of the engines.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Listen to the signals for as long as the server runs."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def deploy(
    method: str,
    method_config: Mapping[str, Any],
    pair: PairConfig,
    workload: str | None,
    state: Path | None,
    host: str,
    port: int,
    api_key: str | None,
    say: Callable[[str], None],
) -> None:
    """Start the engines that ``method`` calls and serve it until SIGINT or SIGTERM.

    Args:
        method: Registered name of a method or variant.
        method_config: Its settings, over its defaults.
        pair: The engines.
        workload: Whose answer format and miss path to use; None means plain chat.
        state: File that keeps the method's state over restarts; None keeps it in memory.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        api_key: What clients must send as a bearer token; None means open.
        say: Told when the service listens.

    Raises:
        UsageError: A name or setting is wrong.
        ModelMissing, EngineUnavailable: An engine did not come up, the encoder's files are missing, or the
            port is taken.
        ReuseBenchError: The state's file is damaged, or of another method.
    """
    cls: Any = method_class(variant(method).method)
    validate(cls.Config, {**variant(method).config, **method_config}, method)
    task = task_of(workload)
    if encoder.needed([method]):
        encoder.check()

    roles = roles_of(method, method_config)
    engines_of(method, roles)  # a fault in it is the user's, and told before anything starts

    async def run() -> None:
        with tempfile.TemporaryDirectory(prefix="reusebench-") as logs, free_socket(host, port) as sock:
            say("starting the engine …")
            async with start_pair(pair, engines_of(method, roles).values(), Path(logs)) as engines:
                service = build_service(
                    method,
                    method_config,
                    task,
                    engines.endpoints_of(method, roles),
                    state=state,
                    api_key=api_key,
                )
                service.compact()
                if api_key is None and not ipaddress.ip_address(sock.getsockname()[0]).is_loopback:
                    say(
                        "warning: without --api-key-env, everyone who reaches this address can read the cache"
                    )
                shown = f"[{host}]" if ":" in host else host
                say(f"{method} listens on http://{shown}:{sock.getsockname()[1]}/v1 (Ctrl-C stops it)")
                await _Server(server_config(service)).serve(sockets=[sock])

    asyncio.run(run())
