"""Check the section `endpoint`."""

from __future__ import annotations

from configs.checks.values import VARIABLE, check_url
from configs.errors import ConfigError
from configs.schema import Config


def check_endpoint(config: Config) -> None:
    """Check the URL of a server, and the variable with its key."""
    endpoint = config.endpoint
    if not endpoint.url:
        if endpoint.model:
            raise ConfigError(
                f"endpoint.model={endpoint.model!r} has no server; add "
                "endpoint.url=http://HOST:PORT/v1"
            )
        return
    check_url("endpoint.url", endpoint.url)
    if endpoint.api_key_env and not VARIABLE.fullmatch(endpoint.api_key_env):
        raise ConfigError(
            "endpoint.api_key_env is no variable's name; give the name, e.g. OPENAI_API_KEY, never "
            "the key itself"
        )
