"""Test that the libraries of a run read the switches of their usage statistics as meant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from usage_statistics import usage_statistics_off

ASKED = """
import json, sys
from mlflow.telemetry.utils import is_telemetry_disabled
from huggingface_hub.constants import HF_HUB_DISABLE_TELEMETRY
from ray._common.usage.usage_lib import usage_stats_enabled
print(json.dumps([is_telemetry_disabled(), HF_HUB_DISABLE_TELEMETRY, not usage_stats_enabled()]))
"""


def test_each_library_takes_its_switch(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", ASKED],
        env=environment | usage_statistics_off(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[true, true, true]\n", done.stderr
    assert not list(tmp_path.rglob("*")), "as MLflow writes its number of this machine there"


def test_a_value_of_the_user_stays() -> None:
    off = usage_statistics_off({"VLLM_NO_USAGE_STATS": "0", "PATH": "/bin"})
    assert off["VLLM_NO_USAGE_STATS"] == "0"
    assert off["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert "PATH" not in off
