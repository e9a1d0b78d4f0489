"""Take names, passwords and queries out of URLs before somebody else reads them.

    public_url(url)        # for a message of ours, whose URL is in the settings
    without_secrets(text)  # for a text of another program, which may quote any URL

This module imports nothing of the project, so that every package may import it.
"""

from __future__ import annotations

import re

# A setting whose name contains one of these may hold a secret.
SECRET_NAMES = "key|token|secret|passw|auth|credential|cookie|header|pin"
IN_A_URL = "://"
SLASHES = r":\\?/\\?/"  # JSON may escape them
URL_LOGIN = re.compile(rf"{SLASHES}[^\s/?#]*@")
# Also a URL without a query, so that what was looked at is not looked at again. urllib3 names the
# path alone: "Max retries exceeded with url: /search?key=...".
URL_QUERY = re.compile(rf"((?:(?:https?|wss?){SLASHES}|url: /)[^\s?#]*)([?#]\S+)?", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Return the text without the names and passwords of its URLs, nor the queries of web servers.

    For texts of other programs. A message of ours quotes `public_url`, which takes out a password
    with any characters.

    >>> without_secrets("http://ann:pa55@host/x?api_key=abc did not answer")
    'http://host/x?... did not answer'
    """
    return URL_QUERY.sub(_without_query, URL_LOGIN.sub(IN_A_URL, text))


def public_url(url: str) -> str:
    """Return a URL without its name, password, query and fragment. Return other texts as they are.

    >>> public_url("http://ann:pa55@host/x?n=1#top")
    'http://host/x'
    """
    scheme, separator, rest = url.partition(IN_A_URL)
    if not separator:
        return url
    shown = re.split("[?#]", rest, maxsplit=1)[0]
    if "@" not in shown and "@" in rest.partition("/")[0]:  # of a password, or of a query
        return f"{scheme}{separator}..."
    server, slash, path = shown.partition("/")
    return f"{scheme}{separator}{server.rpartition('@')[2]}{slash}{path}"


def _without_query(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2][0]}..." if found[2] else found[1]
