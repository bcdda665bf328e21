"""The layers that confine a program, each through the kernel's own interface. Linux; stdlib only.

Every function says whether its layer is now active and never raises because the kernel lacks it: a
machine without one layer still has the others, and the executor reports which.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys

__all__ = [
    "die_with_parent",
    "drop_capabilities",
    "enter_namespaces",
    "filter_program",
    "install_filter",
    "limit_resources",
    "restrict_files",
]

_LINUX = sys.platform == "linux"

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SIGKILL = 9

_CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x04000000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000

_LIBC = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, *values: int) -> bool:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    return _LINUX and _LIBC.prctl(ctypes.c_int(option), *padded) == 0


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends. Changing user namespace undoes it."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def enter_namespaces() -> bool:
    """Leave the machine's network, IPC, host name and processes; true if that worked.

    The caller stays in its process namespace; its next child is the first process of the new one, and the
    kernel kills every process in it when that child ends.
    """
    if not _LINUX:
        return False
    others = _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    # The user namespace is what an unprivileged user needs for the others; root can do without.
    return any(_LIBC.unshare(ctypes.c_int(flags)) == 0 for flags in (others | _CLONE_NEWUSER, others))


def drop_capabilities() -> bool:
    """Give up every capability, for good; true if that worked. Root is then a user like any other."""
    if not _LINUX or not _prctl(_PR_SET_NO_NEW_PRIVS, 1):
        return False
    # No core dumps, and no reading of this memory by others of the same user.
    _prctl(_PR_SET_DUMPABLE, 0)
    header = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    return bool(_LIBC.capset(header, bytes(24)) == 0)


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3


def restrict_files(readable: list[str]) -> bool:
    """Deny every access by path but reading below ``readable`` (Landlock); true if that worked.

    It holds for this process and for its later children, and cannot be undone.
    """
    if not _LINUX:
        return False
    abi = _syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if abi < 1:
        return False
    # A newer kernel knows more rights; one that the kernel does not know may not be asked for.
    rights = 13 + sum(abi >= since for since in (2, 3, 5))
    attributes = struct.pack("=Q", (1 << rights) - 1)
    if abi >= 4:
        attributes += struct.pack("=Q", 0b11)  # no TCP bind, no TCP connect
    if abi >= 6:
        attributes += struct.pack("=Q", 0b11)  # no abstract sockets, no signals to outside
    ruleset = _syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    if ruleset < 0:
        return False
    try:
        for path in readable:
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = struct.pack("=Qi", _READ_FILE | _READ_DIR, folder)
                if _syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0)):
                    return False
            finally:
                os.close(folder)
        return (
            _prctl(_PR_SET_NO_NEW_PRIVS, 1)
            and _syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0)) == 0
        )
    finally:
        os.close(ruleset)


def _syscall(number: int, *arguments: object) -> int:
    return int(_LIBC.syscall(ctypes.c_long(number), *arguments))


# What a single-threaded interpreter calls, as (x86_64, aarch64); -1 where the architecture has no such call.
# Whatever is not here is denied: processes, threads, signals to others, sockets, tracing, changes to files.
_ALLOWED = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "stat": (4, -1),
    "fstat": (5, 80),
    "lstat": (6, -1),
    "poll": (7, -1),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "access": (21, -1),
    "select": (23, -1),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "dup": (32, 23),
    "dup2": (33, -1),
    "nanosleep": (35, 101),
    "getitimer": (36, 102),
    "alarm": (37, -1),
    "setitimer": (38, 103),
    "getpid": (39, 172),
    "exit": (60, 93),
    "uname": (63, 160),
    "getcwd": (79, 17),
    "umask": (95, 166),
    "gettimeofday": (96, 169),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "time": (201, -1),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "getdents64": (217, 61),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "newfstatat": (262, 79),
    "faccessat": (269, 48),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "set_robust_list": (273, 99),
    "dup3": (292, 24),
    "getcpu": (309, 168),
    "getrandom": (318, 278),
    "statx": (332, 291),
    "rseq": (334, 293),
    "faccessat2": (439, 439),
}
_OPENING = {"open": (2, -1), "openat": (257, 56)}
_IOCTL, _FCNTL, _PRLIMIT, _CLONE3 = (16, 29), (72, 25), (302, 261), (435, 435)
_FCNTL_COMMANDS = (0, 1, 2, 3, 1030)  # duplicate, get and set descriptor flags, get status flags

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets into struct seccomp_data
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def filter_program(*, may_open: bool) -> bytes | None:
    """Return the seccomp filter for this machine's architecture, or None where there is none.

    It allows a list of system calls and answers "operation not permitted" to all others. ``may_open``
    allows files to be opened: the filter cannot see paths, so it is for where another layer does.
    """
    column, audit = _ARCHITECTURES.get(platform.machine(), (-1, 0))
    if not _LINUX or column < 0:
        return None
    code: list[tuple[int, int, int, int]] = []

    def step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        code.append((operation, if_true, if_false, value))

    def one_argument(argument: int, values: tuple[int, ...], *, high: bool = False) -> None:
        # Deny at once unless the argument's low (or high) half is one of the values.
        step(_LOAD, _ARGUMENTS + 8 * argument + 4 * high)
        for index, value in enumerate(values):
            step(_JUMP_EQUAL, value, len(values) - index)
        step(_RETURN, _ERRNO | errno.EPERM)

    def special(number: int, body_steps: int) -> None:
        step(_JUMP_EQUAL, number, 0, body_steps)

    step(_LOAD, _ARCHITECTURE)
    step(_JUMP_EQUAL, audit, 1, 0)
    step(_RETURN, _KILL)
    step(_LOAD, _NUMBER)
    # The C library tries the older call, whose denial Python reports as such, only if this one is unknown.
    special(_CLONE3[column], 1)
    step(_RETURN, _ERRNO | errno.ENOSYS)
    # Python asks every file that it opens whether it is a terminal. None is.
    special(_IOCTL[column], 1)
    step(_RETURN, _ERRNO | errno.ENOTTY)
    # fcntl can also have signals sent to others, so only its harmless commands.
    special(_FCNTL[column], len(_FCNTL_COMMANDS) + 3)
    one_argument(1, _FCNTL_COMMANDS)
    step(_RETURN, _ALLOW)
    # Limits of this process may be read: no new limit, no other process.
    special(_PRLIMIT[column], 10)
    for argument, high in ((0, False), (2, False), (2, True)):
        one_argument(argument, (0,), high=high)
    step(_RETURN, _ALLOW)

    calls = _ALLOWED | (_OPENING if may_open else {})
    ranges: list[list[int]] = []
    for number in sorted(numbers[column] for numbers in calls.values() if numbers[column] >= 0):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    # The kernel tries the filter on every call when it is installed: runs of numbers keep that short.
    for index, (low, high_end) in enumerate(ranges):
        to_end = 2 * (len(ranges) - index) - 1
        step(_JUMP_AT_LEAST, low, 0, to_end)
        step(_JUMP_ABOVE, high_end, 0, to_end)
    step(_RETURN, _ERRNO | errno.EPERM)
    step(_RETURN, _ALLOW)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def install_filter(code: bytes) -> bool:
    """Hold this process to the seccomp filter ``code``, for good; true if that worked."""
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    frame = ctypes.create_string_buffer(header, len(header))
    return _prctl(_PR_SET_NO_NEW_PRIVS, 1) and _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(frame))


def limit_resources(*, cpu_s: int, memory_bytes: int, file_bytes: int, open_files: int) -> None:
    """Set the kernel's limits on this process.

    Raises:
        OSError, ValueError: The system refused a limit that binds.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The first limit's signal tells a spent budget from other deaths; the second one cannot be caught.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    if _LINUX:  # elsewhere these do not bind or cannot be lowered
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
