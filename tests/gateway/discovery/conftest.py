"""Gateways that look for workers often."""

import pytest

from gateway.discovery import registration


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(registration, "_LOOK_S", 0.02)
