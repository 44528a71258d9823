import pytest

from kvtransfer.transfer import dialogue
from kvtransfer.transports import transport
from tests.support.kvtransfer.rig import TRANSPORTS


@pytest.fixture(params=TRANSPORTS)
def name(request):
    return request.param


@pytest.fixture
def small_ranges(monkeypatch):
    """One span per Ready, so that a prompt has several."""
    monkeypatch.setattr(dialogue, "MAX_RANGE_BYTES", 1)


@pytest.fixture
def in_threads(monkeypatch):
    monkeypatch.setattr(transport, "INLINE_BYTES", 0)
