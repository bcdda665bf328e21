"""The embedded engine's process: llama.cpp's own HTTP server, through its Python wheel.

:mod:`runners.engines.llamacpp` starts it as ``python -m runners.engines.llamacpp_server JSON``. Standard
input is a lifeline: the process ends when that closes. Standard output carries one line, when the model
is loaded: ``{"url": ...}``. Everything else, llama.cpp's log too, goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from runners.process import die_with_parent

__all__ = ["main"]


def main() -> None:
    """Load the model, say where it is served, and serve until standard input closes."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    die_with_parent(settings["parent"])
    _yield_to_others(settings["nice"])
    # llama.cpp writes to standard output as well: keep that for our one line.
    report = os.dup(1)
    os.dup2(2, 1)
    server = _serve(settings)
    os.write(report, json.dumps({"url": server.listening_address}).encode() + b"\n")
    os.close(report)
    while os.read(0, 1):
        pass
    os._exit(0)  # nothing to save, and the server's threads may be in the middle of a request


def _yield_to_others(nice: int) -> None:
    """Lower this process's share of the cores where others want them, too."""
    if nice:
        os.nice(nice)
        # A process of its own session is in a group of its own, whose share counts instead where Linux groups
        # processes by session.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(nice), encoding="ascii")


def _serve(settings: dict[str, Any]) -> Any:
    import xllamacpp  # type: ignore[import-untyped]

    slots = settings["slots"]
    params = xllamacpp.CommonParams()
    params.model.path = settings["path"]
    params.model_alias = {settings["model"]}
    params.hostnames = ["127.0.0.1"]
    params.port = settings["port"]
    # The context is one total, divided evenly among the slots unless they share it.
    params.n_parallel = slots
    params.n_ctx = settings["context"] * slots
    params.kv_unified = False
    params.fit_params = False  # never shrink what was asked for
    params.cpuparams.n_threads = settings["threads"]
    params.cpuparams_batch.n_threads = settings["threads"]
    # Each open request holds an HTTP thread: too few, and /health waits behind the requests in the queue.
    params.n_threads_http = slots + 64
    # Erased slots must be gone: this cache in host memory would bring them back.
    params.cache_ram_mib = 0
    # A prompt takes the slot that shares most with it, where that is a real part and not just how all prompts
    # of one kind begins; else the one that was idle longest. By default a tenth is enough, and requests to
    # different cache entries keep overwriting one slot while the others stay empty.
    params.slot_prompt_similarity = 0.3
    params.slot_save_path = settings["slot_folder"]  # erasing slots is allowed only with such a folder
    params.endpoint_slots = True
    params.endpoint_metrics = True
    params.sampling.seed = 0
    if settings["drafter"] is not None:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        params.speculative.draft.mparams.path = settings["drafter"]
        params.speculative.draft.n_max = settings["draft_max"]
        params.speculative.draft.cpuparams.n_threads = settings["threads"]
        params.speculative.draft.cpuparams_batch.n_threads = settings["threads"]
    params.ui = False
    params.verbosity = 2  # warnings and errors
    try:
        return xllamacpp.Server(params)
    except RuntimeError as error:  # llama.cpp's own log, just above, has the reason
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
