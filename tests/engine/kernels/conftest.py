"""Models whose linear layers are those of a GPU, wherever they are loaded: compiled there, in Triton's interpreter
here."""

import pytest

from baton.engine.layers.linear.gpu import GpuChoice
from baton.engine.models import loader


@pytest.fixture
def on_gpu_kernels(monkeypatch):
    def choose(name, batch_invariant, dtype, device):
        made = GpuChoice(name, batch_invariant, dtype, device)
        return made, made.reasons

    monkeypatch.setattr(loader, "choose_linear", choose)
