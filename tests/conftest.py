"""Share fixtures between test files, and keep the tests away from the user's own runs and keys."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from actors.prompting.prompt import PromptForm
from configs import PromptConfig

# The tests are about CPU runs, also on a machine with GPUs. TEST_ON_GPU=1 shows the GPUs to the
# tests that need one.
if os.environ.get("TEST_ON_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A second thread of torch spins while it waits for a core: on a busy machine 21 tests of attention
# took 26 s of processor time with two threads, 3 s with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# time decides no test
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# no test asks the Hub, however pytest was started; huggingface_hub reads it once
os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).resolve().parent.parent
# The files that take longest, longest first (`make test` keeps this order), so that no worker is
# left alone with one at the end.
LONGEST = (
    "runs/test_run.py",
    "runs/test_faults.py",
    "driver/test_resume.py",
    "learner/test_rank_group.py",
    "runs/test_lora_run.py",
    "runs/test_vision_run.py",
    "project/test_gpu_proof.py",
    "analysis/view/test_browser.py",
    "cli/test_evaluate_endpoint.py",
    "cli/test_evaluate.py",
    # It kills engines of two processes, whose shared memory lasts as long as its tests. test_run.py
    # looks for such memory, so the two do not begin together.
    "actors/test_vllm.py",
    "driver/test_trackers.py",
    "gigpo/test_oracle.py",
    "store/test_sandbox.py",
    "driver/test_cluster.py",
    "store/test_fsck.py",
    "store/test_offline_import.py",
    "analysis/view/test_server.py",
    "store/test_mutations.py",
    "store/test_s3.py",
    "runs/test_fuzz_runs.py",
    "store/test_crash.py",
    "store/test_bombs.py",
    "store/test_hostile_runs.py",
)
# Files of which one process does all: it forks their engines from one server, which imports vLLM.
ENGINES = (
    "tests/actors/test_vllm.py",
    "tests/actors/test_vllm_adapters.py",
    "tests/actors/test_float32_head.py",
)
USERS_RUNS = str(ROOT / "runs")


def refuse_users_runs(event: str, args: tuple[object, ...]) -> None:
    """Raise PermissionError where a test opens the user's `runs/`, or starts a shipped config
    there.

    A shipped config names `runs/...`, which lies in the repository for a subprocess that starts
    there.
    """
    if event in ("open", "os.listdir", "os.scandir", "os.mkdir") and isinstance(
        args[0], str | os.PathLike
    ):
        path = os.path.abspath(os.fspath(args[0]))
        if path == USERS_RUNS or path.startswith(USERS_RUNS + os.sep):
            raise PermissionError(
                f"{event} {path}: a test may not see the user's runs; use tmp_path"
            )
    elif (
        event == "subprocess.Popen" and args[2] is not None and Path(str(args[2])).resolve() == ROOT
    ):
        words = (
            [str(word) for word in args[1]]
            if isinstance(args[1], list | tuple)
            else str(args[1]).split()
        )
        ships = [
            word
            for word in words
            if word.endswith(".yaml") and (ROOT / word).parent == ROOT / "configs"
        ]
        if ships and not any(word.startswith("run_dir=") for word in words):
            raise PermissionError(
                f"{ships[0]} in {ROOT} uses the user's runs; give run_dir=... in tmp_path"
            )


sys.addaudithook(refuse_users_runs)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import and collect without the garbage collector, and keep it from what was imported.

    It took a third of the time of collecting. DeepSpeed collects garbage at every start of an
    engine, and the modules are most of what it looks through.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # DuckDB reports what the last collection does not find


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files first."""
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(optionalhook=True)  # pytest alone has no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give each worker whole files, and one of them all files of ENGINES."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class EnginesTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return ENGINES[0] if file in ENGINES else file

    return EnginesTogether(config, log)


@pytest.fixture(scope="session", autouse=True)
def _directory_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run module and session fixtures in an empty directory, and keep keys, caches and temporary
    files apart from the user's.
    """
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        os.environ[name] = str(tmp_path_factory.mktemp(name.lower()))
    temporary = tempfile.mkdtemp(prefix="t-")  # not pytest's: names of sockets must be short
    os.environ["TMPDIR"], tempfile.tempdir = temporary, None  # it asks TMPDIR once
    # At the very end: multiprocessing removes a directory of its own in it, with priority -100.
    remove = {"args": (temporary,), "kwargs": {"ignore_errors": True}}
    Finalize(None, shutil.rmtree, **remove, exitpriority=-200)
    with contextlib.chdir(tmp_path_factory.mktemp("session")):
        yield


@pytest.fixture(autouse=True)
def _directory_of_the_test(_directory_of_the_session: None, tmp_path: Path) -> Iterator[None]:
    """Run each test in its own directory, so that relative paths of shipped configs lead nowhere
    else.
    """
    with contextlib.chdir(tmp_path):
        yield


class CharacterTokenizer:
    """One token per character; the chat template puts U: before and A: after the message."""

    eos_token_id = 0

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
    ) -> list[int]:
        assert tokenize
        assert not return_dict
        return self.encode(
            "U:" + conversation[0]["content"] + ("A:" if add_generation_prompt else ""),
            add_special_tokens=False,
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids if token)

    def get_vocab(self) -> dict[str, int]:
        return {}


@pytest.fixture
def form() -> Callable[..., PromptForm]:
    """Makes a PromptForm over characters; keyword arguments change its settings."""

    def make(**changes: object) -> PromptForm:
        settings = {"template": "compact", "history_length": 2, "max_prompt_tokens": 500, **changes}
        return PromptForm(CharacterTokenizer(), PromptConfig(**settings))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def vision_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny vision model, which nobody changes."""
    from tests.support.vision_samples import make_vision_model  # here, as torch comes with it

    path = tmp_path_factory.mktemp("vision")
    make_vision_model(path, ["push every box up down left right"], seed=0)
    return path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real ALFWorld, WebShop and QA data; it is not part of the project. GIGPO_DATA
    names it.
    """
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("GIGPO_DATA") or beside)
    if not folder.is_dir():
        pytest.skip(f"no development data at {folder}; set GIGPO_DATA to the folder that has it")
    return folder
