"""The clock and the waits of the modules that hold refusals back."""

import pytest

from baton.service.security import refusals, resets


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """Those that were begun; none takes any time."""
    begun: list[float] = []

    async def note(seconds: float) -> None:
        begun.append(seconds)

    for module in (refusals, resets):
        monkeypatch.setattr(module, "sleep", note)
    return begun


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    at = [1000.0]
    for module in (refusals, resets):
        monkeypatch.setattr(module, "now", lambda: at[0])
    return at
