"""Define the messages by which weights are sent to the engines, beside their files.

The bytes are those of the files. Learner and engines use a key-value store of torch.distributed,
which the learner runs. The store answers everybody who reaches its port, and lists its keys. So
each key is a digest of its name with a secret, and each value has one behind it. Engines get the
address `secret@host:port`. Without the secret nobody can make the key that answers a call, and so
become a member, or a value that is read. Somebody who reaches the port can still disturb a round.
The engines then load the files, whose digest counts. An engine process joins by taking the next
number of JOINED. A round is one version:

    call/<member>/<n>       learner: the round that the n-th call to this member is for
    ready/<round>/<member>  member: it takes part; the name of its device
    round/<round>           learner: {"group": 3, "members": [1, 4], "device": "cuda"}
    gone/<member>           member: it was left out, or failed; it joins again with a new number

The device is "cuda" if learner and members have a GPU each, and "cpu" otherwise. The files of the
version follow in order, as broadcasts of uint8 in the process group `group/3`. The learner is rank
0, and the members follow in order. Each file begins with a preamble: two numbers of N_BYTES, the
size of its head and that of the whole file. The head is the file up to the first tensor. The bytes
of the file follow as they are, in the pieces of `weight_pieces.py`. A preamble of zeros ends the
round.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

JOINED = "joined"
SECRET_BYTES = 16  # 128 bits, which nobody can guess
DIGEST_BYTES = 32
N_BYTES = 8  # little-endian
PREAMBLE_BYTES = 2 * N_BYTES  # two numbers
# For one question to the key-value store, and for the learner's list of members.
MESSAGE_TIMEOUT = timedelta(seconds=60)


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
    """A store of torch.distributed whose keys and values can only be made with the secret.

    The methods raise the errors of `store`, and ValueError for a value of somebody else. A number
    that is counted up has no digest: `add` returns whatever a stranger made of it.
    """

    secret: str
    store: Any  # dist.Store; this package knows nothing of torch

    def add(self, key: str, amount: int) -> int:
        return int(self.store.add(self.hidden(key), amount))

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self.store.set(self.hidden(key), data + self._digest(f"{key}\0", data))

    def get(self, key: str) -> bytes:
        data = bytes(self.store.get(self.hidden(key)))
        value, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._digest(f"{key}\0", value)):
            raise ValueError(f"a stranger wrote the value of {key!r} into the store of the weights")
        return value

    def check(self, keys: list[str]) -> bool:
        return bool(self.store.check([self.hidden(key) for key in keys]))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.store.wait([self.hidden(key) for key in keys], timeout)

    def hidden(self, key: str) -> str:
        return self._digest(key).hex()

    def _digest(self, key: str, value: bytes = b"") -> bytes:
        return hmac.digest(self.secret.encode(), key.encode() + value, "sha256")


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


def encode_preamble(*, head_bytes: int, file_bytes: int) -> bytearray:
    return bytearray(
        head_bytes.to_bytes(N_BYTES, "little") + file_bytes.to_bytes(N_BYTES, "little")
    )


def decode_preamble(preamble: bytes) -> tuple[int, int]:
    """Return the size of a file's head, and that of the file."""
    head_bytes = int.from_bytes(preamble[:N_BYTES], "little")
    return head_bytes, int.from_bytes(preamble[N_BYTES:], "little")
