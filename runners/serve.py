"""Runs a service: in a process of its own for the runner, or in front of a model for a user."""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvicorn

from bench.engine import Role
from bench.errors import EngineUnavailable, ReuseBenchError
from bench.method import Environment
from bench.registry import method_class, variant, workload
from bench.workload import GenericTask, Task
from methods.execution import IsolatedExecutor
from runners.client import Endpoint
from runners.encoder import SentenceEncoder
from runners.journal import Journal
from runners.process import die_with_parent
from runners.recording import Recording
from runners.service import Service, create_app

__all__ = ["KEEP_ALIVE_S", "build_service", "free_socket", "serve", "task_of"]

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open: longer than our client keeps one, so that it closes first."""


def task_of(name: str | None) -> Task:
    """Return the task of a workload, or the generic one."""
    return workload(name).task if name else GenericTask()


def build_service(
    method: str,
    method_config: Mapping[str, Any],
    task: Task,
    endpoints: Mapping[Role, Endpoint],
    *,
    state: Path | None = None,
    api_key: str | None = None,
    calls: Path | None = None,
) -> Service:
    """Return a service around a method, its state restored, not yet open.

    Args:
        method: Registered name of a method or variant.
        method_config: Its settings; absent ones have their defaults.
        task: What it serves.
        endpoints: Engines by role.
        state: File for the method's state; None keeps it in memory.
        api_key: Bearer token that requests must carry; None means open.
        calls: File for a recording of the engine calls; None records nothing.

    Raises:
        ReuseBenchError: The state's file is damaged, or of another method.
    """
    spec = variant(method)
    cls: Any = method_class(spec.method)
    environment = Environment(task=task, executor=IsolatedExecutor(), encoder=SentenceEncoder())
    instance = cls(cls.Config(**{**spec.config, **method_config}), environment)
    journal, recording = Journal(state), Recording(calls)
    service = Service(method, instance, environment, endpoints, journal, api_key, recording=recording)
    service.restore()
    return service


def free_socket(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Return a bound socket, so that no one else can take the port before the server listens.

    Raises:
        EngineUnavailable: The address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the protocol is named; with it, each reply on a kept
    # connection waits 40 ms for the client's delayed acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise EngineUnavailable(
            f"Can't listen on {host}:{port}: {error.strerror}. Choose another with --port."
        ) from error
    return sock


def server_config(service: Service) -> uvicorn.Config:
    """Return how a service is served, by the runner and in deployment alike."""
    return uvicorn.Config(
        create_app(service),
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def serve(service: Service, sock: socket.socket) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM."""
    uvicorn.Server(server_config(service)).run(sockets=[sock])


def main() -> None:
    """Serve what the JSON file named on the command line says; used by the runner."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--fd", type=int, required=True, help="a bound socket, inherited")
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    spec = json.loads(arguments.spec.read_text(encoding="utf-8"))
    try:
        service = build_service(
            spec["method"],
            spec["method_config"],
            task_of(spec["workload"]),
            {role: Endpoint(**endpoint) for role, endpoint in spec["endpoints"].items()},
            state=Path(spec["state"]),
            calls=Path(spec["calls"]) if spec["calls"] else None,
        )
    except ReuseBenchError as error:
        sys.exit(str(error))
    serve(service, socket.socket(fileno=arguments.fd))


def child_spec(
    method: str,
    method_config: Mapping[str, Any],
    workload_name: str,
    endpoints: Mapping[Role, Endpoint],
    state: Path,
    calls: Path | None = None,
) -> str:
    """Return the JSON that :func:`main` reads. It holds no key: a child reads those from its environment."""
    spec = {
        "method": method,
        "method_config": dict(method_config),
        "workload": workload_name,
        "endpoints": {role: asdict(endpoint) for role, endpoint in endpoints.items()},
        "state": str(state),
        "calls": None if calls is None else str(calls),
    }
    return json.dumps(spec)


def child_command(spec: Path, sock: socket.socket) -> list[str]:
    """Return the command that serves ``spec`` on ``sock`` in a child of this process."""
    fd, parent = str(sock.fileno()), str(os.getpid())
    return [sys.executable, "-m", "runners.serve", str(spec), "--fd", fd, "--parent", parent]


def roles_of(method: str, method_config: Mapping[str, Any]) -> tuple[Role, ...]:
    """Return the roles of the engines that a method variant calls."""
    spec = variant(method)
    cls: Any = method_class(spec.method)
    roles: tuple[Role, ...] = cls.roles(cls.Config(**{**spec.config, **method_config}))
    return roles


if __name__ == "__main__":
    main()
