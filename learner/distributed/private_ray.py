"""Keep Ray private: its sockets, logs and secrets lie where no other user can enter.

    directory = make_ray_directory(run)
    with ray_secrets(directory):              # a Ray started inside answers only to who has these
        with on_the_loopback() as given:      # and to no other machine
            ray.init(job_config=own_imports(), **given, ...)
    remove_ray_directories(run)               # left behind by killed processes

Ray itself is imported inside functions only: the status of a run needs no Ray.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from store import READ_WRITE, StoreError, parse_object, read_run_file, write_atomically

if TYPE_CHECKING:
    from ray.job_config import JobConfig

# Socket paths must be short, and /run/user is removed at logout.
RAY_DIRECTORIES = Path("/tmp")
RAY_DIRECTORY = "gigpo-ray-"
OWNER_FILE = "owner.json"  # in each directory: its run, and the process that made it
ENDED = "ZX"  # states in /proc of a process that has ended but was not reaped yet
# Ray 2.60 leaves CUDA_VISIBLE_DEVICES as it is in an actor with num_gpus=0. With this variable in
# the environment it is set to "" there before the actor's class is loaded, so torch sees no GPU.
RAY_HIDES_GPUS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
# The secrets are passed in files: `ps` would show them on a command line.
RAY_SECRETS = (
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_USE_TLS",
    "RAY_TLS_SERVER_CERT",
    "RAY_TLS_SERVER_KEY",
    "RAY_TLS_CA_CERT",
)
TOKEN_BYTES = 32
LOOPBACK = "127.0.0.1"
# of the certificate: no run outlives it, whatever the clock says
VALID_FROM, VALID_TO = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
START_TICKS = 22  # field of /proc/PID/stat, counted from 1; the state is field 3


@contextmanager
def ray_secrets(directory: Path) -> Iterator[None]:
    """Make a Ray started in this block answer only to its own processes, by files of `directory`.

    Its ports are open to every user of the machine. A new token keeps others from asking for
    anything. But one request needs none and ends Ray's server, whose port another user can then
    take: the processes that are left would send the token there. So each end of a connection also
    has to prove that it can read a new certificate's key.

    By default Ray uses one token for all clusters, from a file in the home directory that others
    may be able to read, and no certificates. End Ray before the block ends.
    """
    token, certificate, key = (directory / name for name in ("token", "cert.pem", "key.pem"))
    certificate_pem, key_pem = _new_certificate()
    for path, content in (
        (token, secrets.token_hex(TOKEN_BYTES).encode()),
        (certificate, certificate_pem),
        (key, key_pem),
    ):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
    before = {name: os.environ.pop(name) for name in RAY_SECRETS if name in os.environ}
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token),
        RAY_USE_TLS="1",
        RAY_TLS_SERVER_CERT=str(certificate),
        RAY_TLS_SERVER_KEY=str(key),
        RAY_TLS_CA_CERT=str(certificate),  # it vouches for itself, and for nothing else
    )
    _reload_ray_settings()
    try:
        yield
    finally:
        for name in RAY_SECRETS:
            os.environ.pop(name, None)
        os.environ.update(before)
        _reload_ray_settings()


def _new_certificate() -> tuple[bytes, bytes]:
    """Return a certificate for LOOPBACK, signed by itself, and its private key, both as PEM."""
    # Here: `gigpo status` needs none.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "the Ray of a run")])
    address = x509.IPAddress(ipaddress.ip_address(LOOPBACK))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_TO)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


@contextmanager
def on_the_loopback() -> Iterator[dict[str, str]]:
    """Make a Ray that is started in this block listen on the loopback only. Yield its argument.

    Ray replaces the loopback by the machine's address on the network, even where
    the loopback is asked for. So the function that does this is replaced meanwhile.
    """
    from ray._private import services

    resolve = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield {"_node_ip_address": LOOPBACK}
    finally:
        services.resolve_ip_for_localhost = resolve


def own_imports() -> JobConfig:
    """Return settings for `ray.init`: Ray's processes import from where this one does only.

    Ray would have them import from the current directory first. That may be a stranger's run, or a
    place where everybody may write, such as /tmp.
    """
    from ray.job_config import JobConfig

    searched = set(map(os.path.abspath, sys.path))

    class SearchPath(list[str]):
        def extend(self, directories: Iterable[str]) -> None:
            super().extend(path for path in directories if os.path.abspath(path) in searched)

    job = JobConfig()
    job._py_driver_sys_path = SearchPath()  # Ray extends it when it connects
    return job


def _reload_ray_settings() -> None:
    """Make Ray read the environment again. It caches the values of its import."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
    from ray._raylet import Config as RaySettings  # type: ignore[attr-defined]

    RaySettings.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def started_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks; None if it does not exist or has ended.

    The kernel counts from the machine's start, so setting the clock changes nothing.
    """
    try:
        about = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The process name comes first and may contain any character, also ")".
    fields = about.rpartition(")")[2].split()
    return None if fields[0] in ENDED else int(fields[START_TICKS - 3])


def make_ray_directory(run: Path) -> Path:
    """Make a directory for a private Ray of this run, for this user alone. Raises StoreError."""
    prefix = f"{RAY_DIRECTORY}{os.getpid()}-"
    try:
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=RAY_DIRECTORIES))
    except OSError as error:
        raise StoreError(
            f"cannot make a directory in {RAY_DIRECTORIES}: {error.strerror}; free space there"
        ) from error
    owner = {**_run_identity(run), "pid": os.getpid(), "started_ticks": started_ticks(os.getpid())}
    try:
        write_atomically(
            directory / OWNER_FILE, json.dumps(owner).encode(), mode=READ_WRITE, beneath=directory
        )
    except StoreError:
        directory.rmdir()
        raise
    return directory


def remove_ray_directories(run: Path) -> None:
    """Remove the directories made for this run by this process or by processes that have ended.

    Paths are found in RAY_DIRECTORIES only. A path read from the run's directory could name any
    directory of this user.
    """
    for path in RAY_DIRECTORIES.glob(f"{RAY_DIRECTORY}*"):
        # A directory may be another user's, vanish meanwhile, or be unfinished.
        with suppress(OSError, ValueError, StoreError):
            if _is_left_over(path, run):
                shutil.rmtree(path, ignore_errors=True)


def _is_left_over(path: Path, run: Path) -> bool:
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        return False
    owner = parse_object(read_run_file(path, OWNER_FILE))
    if any(owner.get(name) != value for name, value in _run_identity(run).items()):
        return False
    pid = owner.get("pid")
    if not isinstance(pid, int) or pid == os.getpid():
        return True
    return started_ticks(pid) != owner.get("started_ticks")


def _run_identity(run: Path) -> dict[str, str]:
    return {"host": socket.gethostname(), "run": str(run.resolve())}
