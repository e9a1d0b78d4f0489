"""Weights sent to the engines beside being published as files: what both ends agree on. The bytes are those of the files.

They meet at a key-value store of torch.distributed, kept by the learner. It answers whoever reaches its port, so all keys
begin with a secret: `secret@host:port` is the address that engines are told. Keys without it are a stranger's and are not
looked at. Whoever has the store list its keys can still disturb a round; then the files are loaded, whose digest counts.
An engine process joins by taking the next number of JOINED. A round is one version:

    call/<member>/<n>       learner: the round that the n-th call to this member is for
    ready/<round>/<member>  member: it takes part
    round/<round>           learner: {"group": 3, "members": [1, 4]}
    gone/<member>           member: it was not among them, or something went wrong; it joins again, under a new number

Then come the files of the version, in order, as broadcasts of uint8 in the process group `group/3`, where the learner is rank 0
and the members follow in order. Each file is N_BYTES with the size of its head; the head, which is the file up to the first
tensor; the tensors in the order of the header, those of more than CUT_BYTES in several cuts. A size of 0 ends the round.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

JOINED = "joined"
SECRET_BYTES = 16
N_BYTES = 8  # little-endian
CUT_BYTES = 64 * 2**20  # of one message: what a device needs beside the model


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a group of processes meets, and the secret that its keys begin with."""

    secret: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.secret}@{self.host}:{self.port}"

    @classmethod
    def new(cls, host: str, port: int) -> Address:
        return cls(secret=secrets.token_hex(SECRET_BYTES), host=host, port=port)

    @classmethod
    def of(cls, text: str) -> Address:
        secret, _, place = text.rpartition("@")
        host, _, port = place.rpartition(":")
        return cls(secret=secret, host=host, port=int(port))


def call_key(member: int, number: int) -> str:
    return f"call/{member}/{number}"


def ready_key(round_number: int, member: int) -> str:
    return f"ready/{round_number}/{member}"


def round_key(round_number: int) -> str:
    return f"round/{round_number}"


def gone_key(member: int) -> str:
    return f"gone/{member}"


def group_prefix(group: int) -> str:
    return f"group/{group}"


def cuts(n_bytes: int) -> Iterator[slice]:
    """Of a piece of so many bytes, one message each: 130 MiB are 64, 64 and 2."""
    return (slice(start, min(start + CUT_BYTES, n_bytes)) for start in range(0, n_bytes, CUT_BYTES))
