"""What an evaluation needs where somebody else's model plays: `endpoint` and nothing of ours."""

from __future__ import annotations

import re
from dataclasses import replace

from configs.schema import Config, EndpointConfig, OfflineConfig


def endpoint_fault(endpoint: EndpointConfig) -> str:
    """What is wrong with it, in one line; "" if nothing is."""
    if not endpoint.url:
        return (
            f"endpoint.model={endpoint.model!r} has no server; add endpoint.url=http://HOST:PORT/v1"
            if endpoint.model
            else ""
        )
    if "@" in endpoint.url:  # it would be written into the run directory
        return "endpoint.url has a name or password in it; leave them out, and name a variable with the key: endpoint.api_key_env"
    if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", endpoint.url):
        return f"endpoint.url={endpoint.url!r} is no URL like http://localhost:8000/v1"
    if endpoint.api_key_env and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", endpoint.api_key_env):
        return "endpoint.api_key_env is no variable's name; give the name, e.g. OPENAI_API_KEY, never the key itself"
    return ""


def without_model(config: Config) -> Config:
    """The config with nothing loaded: the model is the server's, so there is no directory, no
    adapter and no GPU of ours.
    """
    return replace(
        config,
        source=[],
        offline=OfflineConfig(),
        model=replace(config.model, path="", lora_rank=0),
        actors=replace(config.actors, gpus_per_worker=0),
    )
