"""Check and show the URL of a Redis without showing the password that it may hold."""

import re
from urllib.parse import parse_qsl, urlencode, urlsplit

MALFORMED = (
    "not a Redis URL, redis://USER:PASSWORD@HOST:PORT/DB (a number), rediss://... or unix://PATH?db=DB; "
    "percent-encode `/`, `?`, `#` and `@` in the password"
)
UNKNOWN_FIELD = "a Redis URL with a field behind `?` other than db, username and password, and ssl_... of rediss://"
_FIELDS = ("db", "username", "password")  # others of redis-py's would lift the bounds of time and bytes
_DATABASE = re.compile(r"(/\d*)?/?", re.ASCII)  # redis-py would take the digits of any other path, or database 0


def check_url(url: str) -> None:
    """Raise ValueError, without the URL in its message, for a malformed URL, one whose password ends early (the rest
    of it would pass for a path, and its beginning for the host that is shown), or one with other fields than these."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(MALFORMED) from None
    if parts.scheme != "unix" and not _DATABASE.fullmatch(parts.path):
        raise ValueError(MALFORMED)
    behind_host = parts.path + parts.query + parts.fragment
    if parts.scheme != "unix" and "@" in behind_host.partition("=")[0]:
        raise ValueError(MALFORMED)
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    if not all(name in _FIELDS or name.startswith("ssl_") for name in names):
        raise ValueError(UNKNOWN_FIELD)


def without_password(url: str) -> str:
    """Return the URL without users and passwords, which redis-py also takes from the query."""
    parts = urlsplit(url)
    fields = [(name, value) for name, value in parse_qsl(parts.query) if name != "username" and "password" not in name]
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return f"{shown}?{urlencode(fields, safe='/')}" if fields else shown
