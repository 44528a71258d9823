"""bench/cpu.py from end to end with a shape that takes no time: every arm runs, every row is there."""

import sys

import pytest
import torch

from bench import cpu as bench
from bench.arms import cpu_peers
from bench.arms.shape import Shape
from bench.lib import limits, peak
from bench.lib.report import Row

TINY = Shape(2, 128, 256, num_heads=4, num_kv_heads=2, head_dim=32)
TINY_MIXTURE = Shape(2, 128, 64, num_heads=4, num_kv_heads=2, head_dim=32, num_experts=4, num_chosen=2)


class Peer:
    """Answer as a peer's process does, in a second each."""

    def __init__(self, name: str):
        self.name, self.asked = name, []

    def prefill_s(self, kind: str, num_prompt: int) -> float:
        self.asked.append(kind)
        return 1.0

    def step_s(self, kind: str, batch_size: int, num_prompt: int, num_steps: int) -> float:
        self.asked.append(kind)
        return 1.0

    def close(self) -> None:
        pass


@pytest.fixture
def quick(monkeypatch):
    """The bench with a shape that takes no time."""
    threads = torch.get_num_threads()
    for module in (bench, cpu_peers):
        monkeypatch.setattr(module, "LLAMA", TINY)
        monkeypatch.setattr(module, "VOCAB_SIZE", 256)
    monkeypatch.setattr(bench, "MIXTURE", TINY_MIXTURE)
    monkeypatch.setattr(limits, "_SIZE_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "read_bytes_per_s", lambda: 1e15)
    monkeypatch.setattr(bench, "gemv_bytes_per_s", lambda: 1e9)
    monkeypatch.setattr(bench.peak, "measure", lambda num_threads: bench.peak.Peak(1e15, 2e15, "fma", "madd"))
    monkeypatch.setattr(bench, "NUM_THREADS", 1)
    monkeypatch.setattr(bench, "PROMPT", 96)
    monkeypatch.setattr(bench, "BATCHES", (2,))
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("names", [("llama.cpp", "OpenVINO"), ()])
def test_a_run_has_every_row_with_its_limit(monkeypatch, tmp_path, names):
    pytest.importorskip("transformers")
    path = tmp_path / "cpu.json"
    reports = []
    peers = [Peer(name) for name in names]
    monkeypatch.setattr(bench, "open_peers", lambda folder, num_layers: peers)
    monkeypatch.setattr(bench, "open_mixture_peers", lambda folder, num_layers: peers[:1])
    monkeypatch.setattr(bench, "finish", lambda arguments, report: reports.append(report) or 0)
    monkeypatch.setattr(sys, "argv", ["cpu.py", "--quick", "--json", str(path)])
    assert bench.main() == 0
    rows = {row.row: row for row in reports[0].rows}
    num_forms = len(bench.QUICK_FORMS) + len(bench.MIXTURE_GOALS)
    num_decoded = (1 + len(bench.BATCHES)) * len(bench.QUICK_FORMS) + len(bench.MIXTURE_GOALS)
    num_others = 3 + 1  # of the kernel that is not exact, and of the demo model
    assert sum(name.endswith(": A/A") for name in rows) == num_forms + num_decoded + num_others
    for form in bench.QUICK_FORMS:
        goals = bench.GOALS[form]
        for what in ("prefill 96", "decode, batch 1", "decode, batch 2"):
            row = rows[f"{what}, {form}: over llama.cpp {goals.kind}"]
            assert row.value > 0 and row.limit > 0 and (row.against is None) == (not peers)
            assert peers or row.met is None
            assert (f"{what}, {form}: over OpenVINO {goals.openvino_kind}" in rows) == bool(peers)
    for form, goals in bench.MIXTURE_GOALS.items():
        for what in ("prefill 96", "decode, batch 1"):
            row = rows[f"{what}, mixture, {form}: over llama.cpp {goals.kind}"]
            assert row.value > 0 and row.limit > 0 and (row.against is None) == (not peers)
        assert rows[f"decode, batch 1, mixture, {form}: weights read"].met is not None
    assert [set(peer.asked) for peer in peers] == [{"BF16", "Q8_0", "Q4_0"}, {"F16", "Q8_0", "Q4_0"}][: len(peers)]
    assert rows["decode, batch 1, bf16: Python and scheduling"].met is not None
    assert rows["demo model: TPOT"].value > 0
    (chosen,) = {name.split(": over ")[1] for name in rows if ": over transformers" in name}
    assert chosen in ("transformers float32", "transformers bfloat16")
    assert f"decode, batch 1, bf16: over {chosen}" in rows and f"prefill 96, int8: over {chosen}" in rows


def run_bf16(monkeypatch, read_bytes_per_s: list[float]) -> dict[str, Row]:
    """Return the rows of bf16 alone, where the read sweep gives these, one after the other."""
    reports, found = [], iter(read_bytes_per_s)
    monkeypatch.setattr(limits, "read_bytes_per_s", lambda: next(found))
    monkeypatch.setattr(limits, "copy_bytes_per_s", lambda: 1.0)
    monkeypatch.setattr(bench, "gemv_bytes_per_s", lambda: 1.0)
    monkeypatch.setattr(bench, "open_peers", lambda folder, num_layers: [])
    monkeypatch.setattr(bench, "finish", lambda arguments, report: reports.append(report) or 0)
    monkeypatch.setattr(sys, "argv", ["cpu.py", "--quick", "--only", "bf16"])
    assert bench.main() == 0
    return {row.row: row for row in reports[0].rows}


@pytest.mark.usefixtures("quick")
def test_the_limits_of_the_whole_run_count(monkeypatch):
    """And not those of before: a disturbed sweep made weights be read at 1.6 times what the machine can."""
    pytest.importorskip("transformers")
    rows = run_bf16(monkeypatch, [1.0, 1e15])
    assert rows["decode, batch 1, bf16: weights read"].against == 1e6
    assert rows["decode, batch 1, bf16: weights read"].met is False
    assert rows["decode, batch 1, bf16: over llama.cpp BF16"].limit > 1


@pytest.mark.usefixtures("quick")
def test_what_exceeds_its_limit_is_void(monkeypatch):
    pytest.importorskip("transformers")
    rows = run_bf16(monkeypatch, [1.0, 1.0])
    row = rows["decode, batch 1, bf16: weights read: VOID, the limit was disturbed"]
    assert row.ratio > 1 and not row.goal and row.met is None
    assert rows["decode, batch 1, bf16: over llama.cpp BF16"].limit is None


def test_the_peak_of_the_multipliers(monkeypatch):
    """Measured, or unknown; then no row has a limit of it."""
    found = peak.measure(1)
    assert found is None or (found.floats > 1e9 and found.ints > 1e9)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert peak.measure(1) is None
