"""Latency goals of service classes by name: the built-in table, or the operator's file."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from baton.service.settings import SettingsError
from baton.service.slo import Slo, parse_slo

DEFAULT_CLASS = "standard"
BUILT_IN: Mapping[str, Slo] = {
    "interactive": Slo(ttft_s=0.3, tpot_s=0.05),
    "standard": Slo(ttft_s=1.0, tpot_s=0.1),
    "batch": Slo(),
}
_MAX_CLASSES = 16  # each one is a value of a metric's label


def read_classes(path: Path | None) -> Mapping[str, Slo]:
    """Return the classes of a TOML file of lines `name = "ttft=300ms,tpot=50ms"` (empty: no bound), or the built-in
    ones without a file. Raises SettingsError, one line."""
    if path is None:
        return BUILT_IN
    try:
        found = tomllib.loads(path.read_text())
        classes = {name: parse_slo(text) if text else Slo() for name, text in found.items()}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValueError, TypeError, AttributeError) as error:
        raise SettingsError(f"--slo-classes {path}: {getattr(error, 'strerror', None) or error}") from None
    if DEFAULT_CLASS not in classes:
        raise SettingsError(f"--slo-classes {path}: no class {DEFAULT_CLASS}, which is that of requests without one")
    if len(classes) > _MAX_CLASSES:
        raise SettingsError(f"--slo-classes {path}: {len(classes)} classes, at most {_MAX_CLASSES}")
    return classes
