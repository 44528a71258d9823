"""bench/cpu.py from end to end with a shape that takes no time: every arm runs, every row is there."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TINY = dict(NUM_LAYERS=2, HIDDEN_SIZE=128, FFN_SIZE=256, NUM_HEADS=4, NUM_KV_HEADS=2, HEAD_DIM=32, VOCAB_SIZE=256)


class Peer:
    """Answers as llama.cpp's process does, in a second each."""

    asked: list[str]

    def __init__(self, *_):
        self.asked = []

    def prefill_s(self, kind: str, num_prompt: int) -> float:
        self.asked.append(kind)
        return 1.0

    def step_s(self, kind: str, batch_size: int, num_prompt: int, num_steps: int) -> float:
        self.asked.append(kind)
        return 1.0

    def close(self) -> None:
        pass


class NoPeer(Peer):
    def __bool__(self) -> bool:
        return False


@pytest.fixture
def cpu(monkeypatch):
    """The bench as a module, and the modules of its folder under the names that it knows them by."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    before, threads = set(sys.modules), torch.get_num_threads()
    import cpu
    import limits
    import shape

    for name, value in TINY.items():
        monkeypatch.setattr(shape, name, value)
    monkeypatch.setattr(limits, "_SIZE_BYTES", 1 << 20)
    monkeypatch.setattr(cpu, "gemv_bytes_per_s", lambda: 1e9)
    monkeypatch.setattr(cpu.peak, "measure", lambda num_threads: cpu.peak.Peak(bf16=1e9, int8=2e9))
    monkeypatch.setattr(cpu, "NUM_THREADS", 1)
    monkeypatch.setattr(cpu, "PROMPT", 96)
    monkeypatch.setattr(cpu, "BATCHES", (2,))
    yield cpu
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(ROOT / "bench")):
            del sys.modules[name]


@pytest.mark.parametrize("peer", [Peer, NoPeer])
def test_every_row(cpu, monkeypatch, tmp_path, peer):
    pytest.importorskip("transformers")
    path = tmp_path / "cpu.json"
    reports = []
    monkeypatch.setattr(cpu, "LlamaCpp", peer)
    monkeypatch.setattr(cpu, "finish", lambda arguments, report: reports.append(report) or 0)
    monkeypatch.setattr(sys, "argv", ["cpu.py", "--quick", "--json", str(path)])
    assert cpu.main() == 0
    rows = {row.row: row for row in reports[0].rows}
    assert sum(name.endswith(": A/A") for name in rows) == 2 * len(cpu.QUICK_FORMS)
    for form in cpu.QUICK_FORMS:
        goals = cpu.GOALS[form]
        for what in ("prefill 96", "decode, batch 1", "decode, batch 2"):
            row = rows[f"{what}, {form}: over llama.cpp {goals.kind}"]
            assert row.value > 0 and row.limit > 0 and (row.against is None) == (peer is NoPeer)
            assert peer is Peer or row.met is None
    assert rows["decode, batch 1, bf16: Python and scheduling"].met is not None
    assert "decode, batch 1, bf16: over transformers" in rows and "prefill 96, int8: over transformers" in rows


def test_the_peak_of_the_multipliers(monkeypatch):
    """Measured, or unknown; then no row has a limit of it."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    peak = importlib.import_module("peak")
    found = peak.measure(1)
    assert found is None or (found.bf16 > 1e9 and found.int8 > 1e9)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert peak.measure(1) is None
