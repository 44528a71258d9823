"""bench/cpu.py from end to end with a shape that takes no time: every arm runs, every row is there."""

import sys

import pytest
import torch

from bench import cpu as bench
from bench.arms import shape
from bench.lib import limits, peak

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
def quick(monkeypatch):
    """The bench with a shape that takes no time."""
    threads = torch.get_num_threads()
    for name, value in TINY.items():
        monkeypatch.setattr(shape, name, value)
    monkeypatch.setattr(limits, "_SIZE_BYTES", 1 << 20)
    monkeypatch.setattr(bench, "gemv_bytes_per_s", lambda: 1e9)
    monkeypatch.setattr(bench.peak, "measure", lambda num_threads: bench.peak.Peak(bf16=1e9, int8=2e9))
    monkeypatch.setattr(bench, "NUM_THREADS", 1)
    monkeypatch.setattr(bench, "PROMPT", 96)
    monkeypatch.setattr(bench, "BATCHES", (2,))
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("peer", [Peer, NoPeer])
def test_every_row(monkeypatch, tmp_path, peer):
    pytest.importorskip("transformers")
    path = tmp_path / "cpu.json"
    reports = []
    monkeypatch.setattr(bench, "LlamaCpp", peer)
    monkeypatch.setattr(bench, "finish", lambda arguments, report: reports.append(report) or 0)
    monkeypatch.setattr(sys, "argv", ["cpu.py", "--quick", "--json", str(path)])
    assert bench.main() == 0
    rows = {row.row: row for row in reports[0].rows}
    assert sum(name.endswith(": A/A") for name in rows) == 2 * len(bench.QUICK_FORMS)
    for form in bench.QUICK_FORMS:
        goals = bench.GOALS[form]
        for what in ("prefill 96", "decode, batch 1", "decode, batch 2"):
            row = rows[f"{what}, {form}: over llama.cpp {goals.kind}"]
            assert row.value > 0 and row.limit > 0 and (row.against is None) == (peer is NoPeer)
            assert peer is Peer or row.met is None
    assert rows["decode, batch 1, bf16: Python and scheduling"].met is not None
    assert "decode, batch 1, bf16: over transformers" in rows and "prefill 96, int8: over transformers" in rows


def test_the_peak_of_the_multipliers(monkeypatch):
    """Measured, or unknown; then no row has a limit of it."""
    found = peak.measure(1)
    assert found is None or (found.bf16 > 1e9 and found.int8 > 1e9)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert peak.measure(1) is None
