"""Define the messages by which weights are sent to the engines, beside their files.

The bytes are those of the files. Learner and engines use a key-value store of torch.distributed,
which the learner runs. The store answers everybody who reaches its port, and lists its keys. So
each key is a digest of its name with a secret. Engines get the address `secret@host:port`. Without
the secret nobody can make the key that answers a call, and so become a member. Somebody who reaches
the port can still disturb a round. The engines then load the files, whose digest counts. An engine
process joins by taking the next number of JOINED. A round is one version:

    call/<member>/<n>       learner: the round that the n-th call to this member is for
    ready/<round>/<member>  member: it takes part
    round/<round>           learner: {"group": 3, "members": [1, 4]}
    gone/<member>           member: it was left out, or failed; it joins again with a new number

The files of the version follow in order, as broadcasts of uint8 in the process group `group/3`. The
learner is rank 0, and the members follow in order. Each file is N_BYTES with the size of its head,
then the head, which is the file up to the first tensor, then the tensors in the order of the
header. Tensors of more than CUT_BYTES are sent in several cuts. A size of 0 ends the round.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

JOINED = "joined"
SECRET_BYTES = 16
N_BYTES = 8  # little-endian
# For one message, for forming a process group, and for the learner's list of members.
MESSAGE_TIMEOUT = timedelta(seconds=60)
CUT_BYTES = 64 * 2**20  # of one message: the memory that a device needs beside the model


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """The address of the key-value store, with the secret of its keys."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenKeys:
    """A store of torch.distributed whose keys can only be made with the secret.

    The methods raise the errors of `store`.
    """

    secret: str
    store: Any  # dist.Store; this package knows nothing of torch

    def add(self, key: str, amount: int) -> int:
        return int(self.store.add(self.hidden(key), amount))

    def set(self, key: str, value: str) -> None:
        self.store.set(self.hidden(key), value)

    def get(self, key: str) -> bytes:
        return bytes(self.store.get(self.hidden(key)))

    def check(self, keys: list[str]) -> bool:
        return bool(self.store.check([self.hidden(key) for key in keys]))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.store.wait([self.hidden(key) for key in keys], timeout)

    def hidden(self, key: str) -> str:
        return hmac.new(self.secret.encode(), key.encode(), "sha256").hexdigest()


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
    """Divide `n_bytes` into messages: 130 MiB are 64, 64 and 2."""
    return (slice(start, min(start + CUT_BYTES, n_bytes)) for start in range(0, n_bytes, CUT_BYTES))
