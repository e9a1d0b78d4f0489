"""Restrict this process with Landlock: the kernel refuses every file but those below some paths.

    restrict(readable)          # and nothing is written, or sent over TCP
    restrict_writing(paths)     # everything may be read, and sent

Linux 5.13 and newer, without privileges, also for root. The restriction cannot be undone. Only
rights that the running kernel knows are restricted: truncation since ABI 3, TCP since 4, device
ioctls since 5, signals and abstract sockets since 6. No ABI covers changing modes and times of
files, and UDP. SQL has no statement for these.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from store.errors import StoreError

# System calls. Their numbers are the same on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_DEVICE_IOCTL = 1 << 15
_OF_A_FILE = _WRITE_FILE | _READ_FILE | _TRUNCATE
# The number of rights, from bit 0 up, that an ABI knows.
_FILE_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_NET_ABI, _NET_RIGHTS = 4, 0b11  # bind, connect
_SCOPE_ABI, _SCOPES = 6, 0b11  # abstract unix sockets, signals
_PR_SET_NO_NEW_PRIVS = 38


def abi() -> int:
    """Return the Landlock ABI of the running kernel, 0 if it has none."""
    if sys.platform != "linux":
        return 0
    version = _syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION))
    return max(0, version)


def restrict(readable: Sequence[int]) -> None:
    """Take all rights over files and TCP from this process, but reading `readable`.

    These are descriptors of files, and of directories with all that is below them.

    Raises StoreError as `_restrict`.
    """
    version = abi()
    _restrict(
        _rights(version),
        network=_NET_RIGHTS * (version >= _NET_ABI),
        scopes=_SCOPES * (version >= _SCOPE_ABI),
        allowed=dict.fromkeys(readable, _READ_FILE | _READ_DIR),
    )


def restrict_writing(writable: Sequence[Path]) -> None:
    """Take all rights to make, change and remove files from this process, but in `writable`.

    These are files, and directories with all that is below them. Does nothing where the kernel has
    no Landlock. Raises OSError if one is not there, and StoreError as `_restrict`.
    """
    if abi() == 0:
        return
    rights = _rights(abi()) & ~(_EXECUTE | _READ_FILE | _READ_DIR | _DEVICE_IOCTL)
    allowed: dict[int, int] = {}
    try:
        for path in writable:
            allowed[os.open(path, os.O_PATH | os.O_CLOEXEC)] = rights
        _restrict(rights, network=0, scopes=0, allowed=allowed)
    finally:
        for descriptor in allowed:
            os.close(descriptor)


def _rights(version: int) -> int:
    """Return all rights over files that an ABI knows."""
    return (1 << _FILE_RIGHTS_BY_ABI[min(version, max(_FILE_RIGHTS_BY_ABI))]) - 1


def _restrict(rights: int, *, network: int, scopes: int, allowed: Mapping[int, int]) -> None:
    """Take rights, but those that are `allowed` below a descriptor.

    Raises StoreError if the kernel refuses. The restriction holds for the calling thread and for
    threads started later, so there must be no other thread yet.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise StoreError(
            f"cannot lock in a process of {threads} threads; only the one that asks would be "
            "locked in"
        )
    ruleset_attr = struct.pack("=QQQ", rights, network, scopes)
    # An older kernel accepts a longer struct than it knows if the rest is zero.
    ruleset = _call(
        _CREATE_RULESET, ruleset_attr, ctypes.c_size_t(len(ruleset_attr)), ctypes.c_uint32(0)
    )
    try:
        for descriptor, wanted in allowed.items():
            is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            rule = struct.pack("=Qi", wanted if is_directory else wanted & _OF_A_FILE, descriptor)
            below = ctypes.c_int(_PATH_BENEATH)
            _call(_ADD_RULE, ctypes.c_int(ruleset), below, rule, ctypes.c_uint32(0))
        # Without this the kernel accepts a restriction only from root.
        one, zero = ctypes.c_ulong(1), ctypes.c_ulong(0)
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(ctypes.c_int(_PR_SET_NO_NEW_PRIVS), one, zero, zero, zero) != 0:
            raise StoreError(f"prctl(PR_SET_NO_NEW_PRIVS): {os.strerror(ctypes.get_errno())}")
        _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _call(number: int, *arguments: object) -> int:
    result = _syscall(number, *arguments)
    if result < 0:
        raise StoreError(f"Landlock system call {number}: {os.strerror(ctypes.get_errno())}")
    return result


def _syscall(number: int, *arguments: object) -> int:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    return int(syscall(ctypes.c_long(number), *arguments))
