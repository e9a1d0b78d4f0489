"""Run every command that reads a run on crafted runs, as an unprivileged user: python -m
tests.support.fuzz_commands BASE FIRST N

Each finding is one line of JSON on standard output: seed, command, what was crafted, what went
wrong. One process runs all commands, as imports take longer than the commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

NOBODY = 65534
TIME_LIMIT_S = 900  # only for what hangs: a busy machine took 120 s for a command of a second
DATA_LIMIT_BYTES = 12 * 2**30  # below the size of the sparse files that are crafted
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class TooLong(BaseException):
    """The command did not end by itself."""


def main(base: Path, first: int, n_runs: int) -> None:
    become_nobody()
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_LIMIT_BYTES, DATA_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from tests.support.fuzz_runs import SECRET, World, craft, discard

    world = World(base=base)
    for name in ("cache", "state", "temporary", "runtime"):
        (base / name).mkdir(mode=0o700)
    os.environ.update(
        HOME=str(world.home),
        XDG_CACHE_HOME=str(base / "cache"),
        XDG_STATE_HOME=str(base / "state"),
        XDG_RUNTIME_DIR=str(base / "runtime"),
        TMPDIR=str(base / "temporary"),
        MPLCONFIGDIR=str(base / "cache"),
        HF_HUB_OFFLINE="1",
        COLUMNS="120",
    )
    sys.dont_write_bytecode = True
    found = os.fdopen(os.dup(1), "w", buffering=1)
    world.make()
    os.chdir(world.working)
    before = world.snapshot()
    commands = all_commands(world.run, base)
    bystander = start_bystander(base)
    signal.signal(signal.SIGALRM, too_long)
    try:
        for seed in range(first, first + n_runs):
            for name, command in commands.items():
                crafted = craft(world, seed)  # anew: the command before may have repaired it
                wrong, output = outcome(command, base / "output")
                now = world.snapshot()
                if now != before:
                    changed = sorted(
                        path for path in {*before, *now} if before.get(path) != now.get(path)
                    )
                    wrong.append(f"changed outside the run: {changed}")
                    restore(world, before)
                    before = world.snapshot()
                if bystander.poll() is not None:
                    wrong.append("a process that is not the run's was ended")
                    bystander = start_bystander(base)
                if not (base / "gigpo-ray-x").is_dir() and any(
                    "gigpo-ray-x" in text for text in crafted
                ):
                    wrong.append("a session directory that this user did not make was removed")
                if SECRET in output:
                    wrong.append("a file outside the run was shown")
                if control := CONTROL.search(output):
                    wrong.append(
                        "a control character was shown: "
                        f"{output[max(0, control.start() - 60) :][:120]!r}"
                    )
                if "Traceback" in output:
                    wrong.append(f"a traceback was shown: {output[-1500:]}")
                for text in wrong:
                    print(
                        json.dumps(
                            {"seed": seed, "command": name, "crafted": crafted, "wrong": text}
                        ),
                        file=found,
                    )
                shutil.rmtree(base / "destination", ignore_errors=True)
                (base / "report.html").unlink(missing_ok=True)
            if sys.stderr.isatty() or seed % 50 == 0:
                print(f"{seed - first + 1} of {n_runs} runs", file=sys.stderr, flush=True)
        discard(world.run)
    finally:
        bystander.kill()


def start_bystander(base: Path) -> subprocess.Popen[bytes]:
    """Start a process of the same user, which no command may end."""
    # Not with our output: whoever waits for its end would wait for this process too.
    bystander = subprocess.Popen(["sleep", "100000"], stdout=subprocess.DEVNULL)
    (base / "bystander.pid").write_text(str(bystander.pid))
    return bystander


def become_nobody() -> None:
    """Start again without root's rights, under which permissions mean nothing.

    Keep only the right to read, as the interpreter may lie in root's home.
    """
    if os.getuid() == 0:
        user = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
        reads = [f"--{kind}-caps=-all,+dac_read_search" for kind in ("inh", "ambient")]
        command = [sys.executable, "-m", "tests.support.fuzz_commands", *sys.argv[1:]]
        os.execvp("setpriv", ["setpriv", *user, *reads, *command])


def all_commands(run: Path, base: Path) -> dict[str, Callable[[], int]]:
    """Return every command that reads a run, by a name."""
    from cli.__main__ import main

    new, text = str(base / "destination"), str(run)

    def store_command(*words: str) -> Callable[[], int]:
        return lambda: main(list(words))

    return {
        "sql": store_command("sql", text, "SELECT * FROM steps LIMIT 5"),
        "sql csv": store_command("sql", text, "SELECT * FROM groups", "--format", "csv"),
        "sql json": store_command("sql", text, "SELECT * FROM lineage", "--format", "json"),
        "sql as of": store_command(
            "sql", text, "SELECT count(*) FROM trajectories", "--as-of", "5"
        ),
        "export": store_command("export", text, new),
        "bias": store_command("bias", text),
        "fsck": store_command("fsck", text),
        "fsck repair": store_command("fsck", text, "--repair"),
        "rebuild": store_command("rebuild", text, "--force"),
        "compact": store_command("compact", text, "--snapshot-window", "0", "--keep-versions", "1"),
        "import": store_command("import", text, text),
        "fetch": store_command("fetch", f"file://{text}", new),
        "status": lambda: main(["status", text]),
        "stop": lambda: main(["stop", text]),
        "workers": lambda: main(["workers", text, "2"]),
        "resume": lambda: main(["train", "--resume", text, "--dry-run"]),
        "fork": lambda: main(["train", "--fork", f"{text}@1", f"run_dir={new}", "--dry-run"]),
        "evaluate": lambda: main(["evaluate", text, f"run_dir={new}", "--dry-run"]),
        "compare": lambda: main(["evaluate", "--compare", text, text]),
        "audit": lambda: main(["audit", text]),
        "audit against": lambda: main(["audit", text, "omega=0", "--against"]),
        "export model": lambda: main(["export-model", text, new]),
        "replay": lambda: main(["replay", text, "1"]),
        "report": lambda: main(["report", text, "--output", str(base / "report.html")]),
        "view": lambda: look_at(run),
    }


def look_at(run: Path) -> int:
    """Ask for pages of `gigpo view`, and print what is shown. Return 2 if the run is refused."""
    from starlette.testclient import TestClient

    from analysis.view.server import make_app
    from printable import UserError, printable

    try:
        app = make_app([run], token="token")
    except UserError as error:
        print(printable(error))  # as the command does
        return 2
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        for page in ("/", "/run", "/groups", "/funnel", "/sql?q=FROM+trajectories&panel=answer"):
            answer = client.get(page)
            print(answer.status_code, answer.text)
            if answer.status_code >= 500:
                return answer.status_code
    return 0


def outcome(command: Callable[[], int], output: Path) -> tuple[list[str], str]:
    """Run the command. Return what was wrong about its end, and all that it printed."""
    wrong = []
    with captured(output):
        signal.alarm(TIME_LIMIT_S)
        began = time.monotonic()
        try:
            status = command()
            if status not in (0, 1, 2, 3):
                wrong.append(f"exit status {status}")
        except SystemExit as end:
            if end.code not in (0, 1, 2, 3):
                wrong.append(f"exit status {end.code}")
        except TooLong:
            wrong.append(f"no end within {time.monotonic() - began:.0f} s")
        except BaseException:  # noqa: BLE001  a traceback is what is looked for
            wrong.append(f"traceback: {traceback.format_exc()[-3000:]}")
        finally:
            signal.alarm(0)
    return wrong, output.read_text(errors="backslashreplace")


@contextlib.contextmanager
def captured(output: Path) -> Iterator[None]:
    """Send standard output and error of this process and its children to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)


def restore(world: object, before: dict) -> None:
    """Put the reader's files back as they were."""
    for place in (world.outside, world.home, world.working):  # type: ignore[attr-defined]
        for entry in place.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    for text, (mode, _, mtime_ns, content) in before.items():
        path = Path(text)
        if (mode & 0o170000) == 0o040000:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.write_bytes(content)
            os.utime(path, ns=(mtime_ns, mtime_ns))
        path.chmod(mode & 0o7777)


def too_long(*_: object) -> None:
    raise TooLong


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
