"""Which tenants may name which adapter, from a file that is read again when it changes.

support-bot = ["acme", "default"]        # an adapter that is not in the file is for all
"""

import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path

from baton.service.clock import now
from baton.service.file_stamp import file_stamp
from baton.service.logs import fields
from baton.service.settings import SettingsError

_LOOK_S = 1.0  # between two looks for a changed file

log = logging.getLogger(__name__)


class AdapterTenants:
    """The tenants of adapters; without a file all may name every adapter."""

    def __init__(self, path: Path | None = None):
        """Read the file. Raises SettingsError, one line; later a file that cannot be read changes nothing."""
        self._path, self._stamp, self._looked_at = path, path and file_stamp(path), now()
        self._table = _read(path) if path else {}

    def may_name(self, tenant: str, adapter: str) -> bool:
        """Return whether a tenant may name an adapter."""
        if self._path is not None and now() - self._looked_at >= _LOOK_S:
            self._looked_at = now()
            self._read_again(self._path)
        tenants = self._table.get(adapter)
        return tenants is None or tenant in tenants

    def _read_again(self, path: Path) -> None:
        if (stamp := file_stamp(path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._table = _read(path)
            log.info("tenants of adapters read again %s", fields(adapters=len(self._table)))
        except SettingsError as error:
            log.error("tenants of adapters: the old ones stay in use %s", fields(error=error))


def _read(path: Path) -> Mapping[str, frozenset[str]]:
    """Return the allowed tenants by adapter name. Raises SettingsError, one line."""
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
