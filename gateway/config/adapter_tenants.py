"""Read which tenants may name which adapter.

support-bot = ["acme", "default"]        # an adapter that is not in the file is for all
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from baton.service.settings import SettingsError


def read_adapter_tenants(path: Path | None) -> Mapping[str, frozenset[str]]:
    """Return the allowed tenants by adapter name. Raises SettingsError, one line."""
    if path is None:
        return {}
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"--adapter-tenants {path}: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"--adapter-tenants {path}: not TOML: {error}") from None
    for name, tenants in table.items():
        if not isinstance(tenants, list) or not all(isinstance(tenant, str) and tenant for tenant in tenants):
            raise SettingsError(f'--adapter-tenants {path}: {name}: give the names of tenants, ["a", "b"]')
    return {name: frozenset(tenants) for name, tenants in table.items()}
