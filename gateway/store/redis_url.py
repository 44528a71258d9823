"""The URL of a Redis, which may hold a password: what of it may be shown, and what is wrong with it without showing it."""

from urllib.parse import parse_qsl, urlencode, urlsplit

MALFORMED = (
    "not a Redis URL, redis://USER:PASSWORD@HOST:PORT/DB, rediss://... or unix://PATH; "
    "percent-encode `/`, `?`, `#` and `@` in the password"
)


def check_url(url: str) -> None:
    """Raises ValueError, which does not name it, for a URL whose password ends early: its rest would pass for a path, and
    its beginning for the host that is shown."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(MALFORMED) from None
    behind_host = parts.path + parts.query + parts.fragment
    if parts.scheme != "unix" and "@" in behind_host.partition("=")[0]:
        raise ValueError(MALFORMED)


def without_password(url: str) -> str:
    """Return the URL without what its user alone may know: user and passwords, which redis-py takes from the query too."""
    parts = urlsplit(url)
    fields = [(name, value) for name, value in parse_qsl(parts.query) if name != "username" and "password" not in name]
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return f"{shown}?{urlencode(fields, safe='/')}" if fields else shown
