"""Switch off the usage statistics of the libraries that a run loads.

    os.environ.update(usage_statistics_off(os.environ))     # before they are imported

MLflow, a tracker that DeepSpeed would import too, writes a file into the home directory when it is
imported, and starts a thread that sends what is used.
"""

from __future__ import annotations

from collections.abc import Mapping

# Each library documents its own variable. Others know the common one: vLLM and huggingface_hub do.
_SWITCHES = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # takes no "1" of DO_NOT_TRACK
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def usage_statistics_off(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that switch them off. The user's own values of them stay."""
    return {name: environment.get(name, value) for name, value in _SWITCHES.items()}
