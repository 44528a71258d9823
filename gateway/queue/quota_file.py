"""The bounds of a tenant, and the TOML file that has them for all tenants."""

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_BURST_S = 10.0  # of the rate, if the file gives no burst
_FIELDS = ("tokens_per_s", "burst_tokens", "concurrent_requests", "max_priority")
_OF_A_MODEL = ("tokens_per_s", "burst_tokens", "concurrent_requests")
_INTEGERS = ("concurrent_requests", "max_priority")


class Quota(NamedTuple):
    """The bounds of a tenant; None: no bound. A request counts once for each of its choices. Priorities above
    `max_priority` are lowered to it."""

    tokens_per_s: float | None = None
    burst_tokens: float = 0.0
    concurrent_requests: int | None = None
    max_priority: int = 0

    @property
    def is_bounded(self) -> bool:
        """Whether tokens or choices are bounded."""
        return self.tokens_per_s is not None or self.concurrent_requests is not None


def read_quotas(path: Path | None) -> Mapping[str, Quota]:
    """Return the quotas in a TOML file by usage name. It has a table for each tenant, and `default` for all others:

        [default]
        tokens_per_s = 20000
        burst_tokens = 100000       # 10 s of the rate when it is left out
        concurrent_requests = 32    # a request with n = 8 counts as 8
        max_priority = 5            # 0 when it is left out

        [default.models.chat]       # for requests of one model
        tokens_per_s = 5000

    A tenant that has only tables for models keeps the default's bounds for all its requests. Raises ValueError, one
    line."""
    if path is None:
        return {}
    try:
        tables = tomllib.loads(path.read_text())
        found = {}
        for name, table in tables.items():
            models = table.pop("models", {}) if isinstance(table, dict) else {}
            if not isinstance(models, dict):
                raise ValueError(f"[{name}] models is not a table: write [{name}.models.NAME] and its lines")
            if table or not models:  # else there is no [name] in the file, only [name.models.*]
                found[name] = _quota(name, table, _FIELDS)
            for model, own in models.items():
                found[usage_name(name, model)] = _quota(f"{name}.models.{model}", own, _OF_A_MODEL)
        return found
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def usage_name(tenant: str, model: str) -> str:
    """Return the name under which a tenant's usage is counted, of all its requests or of those for `model`. It is at
    most 17 characters longer than the tenant's, however long the model's name is."""
    return f"{tenant}@{hashlib.sha256(model.encode()).hexdigest()[:16]}" if model else tenant


def _quota(name: str, table: object, known: Sequence[str]) -> Quota:
    if not isinstance(table, dict):
        raise ValueError(f"{name} is not a table: write [{name}] and a line for each of {', '.join(known)}")
    for field, value in table.items():
        if field not in known:
            raise ValueError(f"[{name}] {field} is not one of {', '.join(known)}")
        kinds = int if field in _INTEGERS else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1e12:
            raise ValueError(f"[{name}] {field} = {value!r}: a number over 0 is needed")
    rate = table.get("tokens_per_s")
    if rate is None and "burst_tokens" in table:
        raise ValueError(f"[{name}] burst_tokens has no effect without tokens_per_s")
    burst_tokens = table.get("burst_tokens", _BURST_S * (rate or 0))
    return Quota(rate, burst_tokens, table.get("concurrent_requests"), table.get("max_priority", 0))
