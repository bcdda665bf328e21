"""Child processes that never outlive their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Make this process end when the process ``parent`` does, however that ends.

    Call it first thing in a child. On Linux the kernel sends SIGKILL; elsewhere a thread watches for
    the parent's id to change.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _watch(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(0.5)
    os._exit(1)
