"""Commands of models run in this process, which stays as it was."""

import signal

import pytest
import torch


@pytest.fixture(autouse=True)
def keep_process(monkeypatch):
    """Signals and threads of the test's own process stay as they are."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
