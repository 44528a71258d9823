"""The CPU engine against llama.cpp, OpenVINO and transformers: python bench/cpu.py [--quick] [--json FILE]
[--only PART ...].

Llama-3.2-1B's shape with random weights, 2 threads, everything in turn: prompts of 512 tokens, decoding one, 8 and 32
sequences behind prompts of 8 tokens, for each weight form beside the peers' file of as many bits; the demo model's time
per output token; and a mixture of Qwen3-MoE's kind beside llama.cpp (1.9 B parameters, of which a token meets 0.4 B).
`make bench-peers` installs llama.cpp and OpenVINO; without it our rows stand alone. BATON_ISA=x86-64-v3 measures that
tier, against a llama.cpp that is built for it (`make bench-peers ISA=x86-64-v3`). --quick: 2 of the 16 layers, three
weight forms and fewer rounds.

The limit of a row is what its weights could be read or multiplied at, whichever is slower: the best of a read sweep, a
copy (read and written bytes) and our own matrix-vector product; the multipliers on registers alone (peak.cpp). They are
measured before every form, and the best of the whole run counts. What a row exceeds by over 5 % was disturbed: such a
row has no limit, and "weights read" no goal.
"""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import gc
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from baton.engine.layers.linear import choose
from baton.engine.native.tier import available
from baton.engine.weights.forms import IntWeight
from bench.arms.cpu_arms import FORMS, Arm, Ours, linear_weights, make_spec
from bench.arms.cpu_peers import LLAMA_CPP, OPENVINO, Peer, Transformers, open_mixture_peers, open_peers, peers_python
from bench.arms.shape import LLAMA, MIXTURE, VOCAB_SIZE, Shape
from bench.lib import limits, peak
from bench.lib.paths import MODEL
from bench.lib.report import Report, finish, interleave, medians, start
from tests.support import bare_engine

NUM_THREADS = 2
PROMPT, SHORT_PROMPT = 512, 8
BATCHES = (8, 32)
OPENVINO_GOAL = "ratio >= 1.0"


@dataclass(frozen=True)
class Goals:
    """Goals against llama.cpp with its file of as many bits; empty: none. OpenVINO reads F16 where that is BF16."""

    kind: str  # type of that file
    prefill: str
    decode: str

    @property
    def openvino_kind(self) -> str:
        return "F16" if self.kind == "BF16" else self.kind


PARTS = (*FORMS, "not-exact", "demo", "mixture")  # names for --only; a form stands for all its rows

AVX512_GOALS = {
    "bf16": Goals("BF16", "ratio >= 1.3", "ratio >= 1.05"),
    "int8": Goals("Q8_0", "ratio >= 3.7", "ratio >= 1.1"),
    "int8-g32": Goals("Q8_0", "", ""),
    "int4-g32": Goals("Q4_0", "ratio >= 2.6", "ratio >= 1.2"),
    "int4-g128": Goals("Q4_0", "ratio >= 2.5", "ratio >= 1.1"),
}
AVX2_GOALS = {
    "bf16": Goals("BF16", "ratio >= 1.1", "ratio >= 1.0"),
    "int8": Goals("Q8_0", "ratio >= 1.6", "ratio >= 1.1"),
    "int8-g32": Goals("Q8_0", "", ""),
    "int4-g32": Goals("Q4_0", "ratio >= 1.4", "ratio >= 1.1"),
    "int4-g128": Goals("Q4_0", "", ""),
}
HAS_VNNI = "avx512-vnni-bf16" in (tier.name for tier in available())
GOALS, BATCH_GOAL, DEMO_GOAL = (
    (AVX512_GOALS, "ratio >= 2.0", "value <= 0.6") if HAS_VNNI else (AVX2_GOALS, "ratio >= 1.6", "value <= 1.5")
)
QUICK_FORMS, QUICK_LAYERS = ("bf16", "int8", "int4-g32"), 2
LIMIT_SHARE = {"bf16": "ratio >= 0.85", "int8": "ratio >= 0.85"}
MIXTURE_GOALS = {
    "int8": Goals("Q8_0", "ratio >= 1.5", "ratio >= 1.1"),
    "int4-g32": Goals("Q4_0", "ratio >= 1.5", "ratio >= 1.1"),
}
TOLERANCE = 1.05  # times its limit: a row that reaches more shows that the limit was disturbed
MIXTURE_LIMIT_SHARE = dict.fromkeys(MIXTURE_GOALS, "ratio >= 0.85")
TRANSFORMERS_GOALS = {"bf16": ("", "ratio >= 2.5"), "int8": ("ratio >= 1.8", "")}  # prefill, decode


class Bench:
    """The rows of one run."""

    def __init__(
        self, report: Report, quick: bool, peers: list[Peer], model: Shape, num_layers: int, goals: Mapping[str, Goals],
        limit_share: Mapping[str, str], batches: Sequence[int], kind: str = "",
    ):  # fmt: skip
        """Prepare a run. `kind`: of the model, in rows that are not the Llama's."""
        self._report, self._peers, self._num_layers, self._kind = report, peers, num_layers, kind
        self._goals, self._limit_share, self._batches = goals, limit_share, batches
        self._num_rounds, self._num_steps = (2, 6) if quick else (3, 16)
        self._spec = make_spec(model, num_layers, VOCAB_SIZE)
        self._transformers: Transformers | None = None
        self._limits: dict[tuple[str, str], float] = {}  # (what, unit) -> the best value so far
        self._multipliers: dict[str, tuple[str, str]] = {}  # floats | ints -> their limit
        self._bounded: dict[str, Callable[[], float | None]] = {}  # row -> its limit, by those measured until then
        self._weights_read: list[tuple[str, str, float]] = []  # form, row, bytes/s

    def _measure_limits(self) -> None:
        """Measure the limits again before every form, so that one disturbance does not affect all of them."""
        found = {
            ("read sweep", "GB/s"): limits.read_bytes_per_s(),
            ("copy", "GB/s"): limits.copy_bytes_per_s(),
            ("own int8 matrix-vector product", "GB/s"): gemv_bytes_per_s(),
        }
        if peaks := peak.measure(NUM_THREADS):
            self._multipliers = {
                "floats": (f"{peaks.float_instruction} on registers", "GFLOP/s"),
                "ints": (f"{peaks.int_instruction} on registers", "GOP/s"),
            }
            found |= {self._multipliers["floats"]: peaks.floats, self._multipliers["ints"]: peaks.ints}
        self._limits |= {name: max(value, self._limits.get(name, 0)) for name, value in found.items()}

    def limits(self) -> None:
        """Judge the forms by the limits of the whole run, which none of them knows before the last one is measured."""
        if not self._bounded:
            return
        self._measure_limits()
        for name, limit in self._bounded.items():
            self._report.bound(name, limit(), TOLERANCE)
        best = self._read_bytes_per_s
        for form, row, read in self._weights_read:
            is_void = read > TOLERANCE * best
            void, goal = (": VOID, the limit was disturbed", "") if is_void else ("", self._limit_share.get(form, ""))
            self._report.add(f"{row}: weights read{void}", read / 1e9, "GB/s", against=best / 1e9, goal=goal)
        for (name, unit), value in self._limits.items():
            self._report.add(f"{self._kind}machine: {name}", value / 1e9, unit)

    @property
    def _read_bytes_per_s(self) -> float:
        return max(value for (_, unit), value in self._limits.items() if unit == "GB/s")

    def _multiply_limit(self, name: str, num_weights: int) -> float | None:
        """Return the tokens/s at which these weights can be multiplied; None if unknown."""
        which = self._multipliers.get("floats" if FORMS[name].bits == 16 else "ints")
        return None if which is None else self._limits[which] / (2 * num_weights)

    def form(self, name: str) -> None:
        """Add all rows of one weight form."""
        self._measure_limits()
        goals, ours = self._goals[name], Ours(name, self._spec)
        self._memory(name, ours)
        peer = self._transformers if name in TRANSFORMERS_GOALS and not self._kind else None
        arms = {"ours": lambda: ours.prefill_s(PROMPT), "A/A": lambda: ours.prefill_s(PROMPT)}
        for each in self._peers:
            arms[each.name] = lambda each=each: each.prefill_s(kind_for(each, goals), PROMPT)
        if peer is not None:
            arms["transformers"] = lambda: peer.prefill_s(PROMPT)
        transformers_goal = TRANSFORMERS_GOALS.get(name, ("", ""))[0]
        row, num_weights = f"prefill {PROMPT}, {self._kind}{name}", linear_weights(self._spec, head=False)
        limit = partial(self._multiply_limit, name, num_weights)
        self._rows(row, PROMPT, arms, goals, goals.prefill, transformers_goal, limit)
        for batch_size in (1, *self._batches):
            self._decode(name, ours, batch_size, goals, peer if batch_size == 1 else None)

    def _decode(self, name: str, ours: Ours, batch_size: int, goals: Goals, peer: Transformers | None) -> None:
        steps = self._num_steps if batch_size == 1 else self._num_steps // 2
        arms = dict.fromkeys(("ours", "A/A"), lambda: ours.step_s(batch_size, SHORT_PROMPT, steps))
        for each in self._peers:
            arms[each.name] = lambda each=each: each.step_s(kind_for(each, goals), batch_size, SHORT_PROMPT, steps)
        transformers_goal = TRANSFORMERS_GOALS.get(name, ("", ""))[1]
        if peer is not None and transformers_goal:
            arms["transformers"] = lambda: peer.step_s(SHORT_PROMPT, steps)
        goal = goals.decode if batch_size == 1 else BATCH_GOAL
        num_weights, step_bytes = linear_weights(self._spec, head=True), ours.step_bytes

        def limit() -> float:
            read, multiplied = self._read_bytes_per_s / step_bytes * batch_size, self._multiply_limit(name, num_weights)
            return read if multiplied is None else min(read, multiplied)

        row = f"decode, batch {batch_size}, {self._kind}{name}"
        rate = self._rows(row, batch_size, arms, goals, goal, transformers_goal, limit)
        if batch_size == 1:
            self._weights_read.append((name, row, rate * step_bytes))

    def _rows(
        self, row: str, num_tokens: int, arms: dict[str, Callable[[], float]], goals: Goals, goal: str,
        transformers_goal: str, limit: Callable[[], float | None],
    ) -> float:  # fmt: skip
        """Compare the tokens/s of all arms with ours; return ours."""

        def add(name: str, against: float | None, goal: str) -> None:
            self._report.add(name, found["ours"], "tokens/s", against=against, goal=goal)
            self._bounded[name] = limit

        interleave(arms, 1)  # warm
        found = {arm: num_tokens / seconds for arm, seconds in medians(interleave(arms, self._num_rounds)).items()}
        llama_cpp = found.get(LLAMA_CPP)
        add(f"{row}: over {LLAMA_CPP} {goals.kind}", llama_cpp, goal if llama_cpp else "")
        if openvino := found.get(OPENVINO):
            add(f"{row}: over {OPENVINO} {goals.openvino_kind}", openvino, OPENVINO_GOAL)
        if peer := found.get("transformers"):
            add(f"{row}: over {self._transformers.name}", peer, transformers_goal)
        self._report.add(f"{row}: A/A", found["A/A"], "tokens/s", against=found["ours"])
        return found["ours"]

    def _memory(self, name: str, ours: Ours) -> None:
        resident, stored = ours.resident_bytes / 2**20, ours.report.file_bytes / 2**20
        self._report.add(
            f"{self._kind}{name}: resident weights over stored", resident, "MiB", against=stored, goal="ratio <= 1.05"
        )

    def not_exact(self) -> None:
        """Compare bf16 in the kernel that batch invariance rules out with ours in bf16."""
        exact, fast = Ours("bf16", self._spec), Ours("bf16", self._spec, linear="fast", batch_invariant=False)
        for row, num_tokens, measure in (
            (f"prefill {PROMPT}", PROMPT, lambda arm: arm.prefill_s(PROMPT)),
            ("decode, batch 1", 1, lambda arm: arm.step_s(1, SHORT_PROMPT, self._num_steps)),
            ("decode, batch 8", 8, lambda arm: arm.step_s(8, SHORT_PROMPT, self._num_steps // 2)),
        ):
            arms = dict.fromkeys(("exact", "A/A"), lambda: measure(exact)) | {"fast": lambda: measure(fast)}
            interleave(arms, 1)
            found = {arm: num_tokens / seconds for arm, seconds in medians(interleave(arms, self._num_rounds)).items()}
            name = f"{row}, bf16: F.linear, not batch-invariant, over exact"
            self._report.add(name, found["fast"], "tokens/s", against=found["exact"])
            self._report.add(f"{name}: A/A", found["A/A"], "tokens/s", against=found["exact"])

    def demo(self) -> None:
        """Measure the demo model with one request at a time."""
        arm = Arm(bare_engine.load_engine(MODEL, max_model_len=1024, num_blocks=64))
        arms = {"demo": lambda: arm.step_s(1, SHORT_PROMPT, 256), "A/A": lambda: arm.step_s(1, SHORT_PROMPT, 256)}
        interleave(arms, 1)
        found = {name: 1e3 * seconds for name, seconds in medians(interleave(arms, self._num_rounds)).items()}
        self._report.add("demo model: TPOT", found["demo"], "ms", goal=DEMO_GOAL)
        self._report.add("demo model: TPOT: A/A", found["A/A"], "ms", against=found["demo"])

    def best_transformers(self) -> None:
        """Choose bf16 or fp32 for transformers, whichever reads a prompt faster; later rows use the choice."""
        found = {}
        for dtype in (torch.float32, torch.bfloat16):
            model = Transformers(self._num_layers, dtype)
            seconds = [model.prefill_s(PROMPT) for _ in range(3)]
            step = model.step_s(SHORT_PROMPT, self._num_steps)
            self._report.add(f"{model.name}: prefill {PROMPT}", PROMPT / min(seconds), "tokens/s")
            self._report.add(f"{model.name}: decode, batch 1", 1 / step, "tokens/s")
            if not found or min(seconds) < found["seconds"]:
                found = {"seconds": min(seconds), "model": model}
        self._transformers = found["model"]

    def overhead(self) -> None:
        """Measure a step of an engine with as many layers and nearly no weights: Python, scheduling and call
        overhead."""
        tiny, ours = (
            Ours("bf16", make_spec(replace(LLAMA, hidden_size=64, ffn_size=64), self._num_layers, 256)),
            Ours("bf16", self._spec),
        )
        steps = self._num_steps
        engines = {"tiny": tiny, "ours": ours}
        arms = {name: lambda engine=engine: engine.step_s(1, SHORT_PROMPT, steps) for name, engine in engines.items()}
        found = medians(interleave(arms, self._num_rounds))
        row, milliseconds = "decode, batch 1, bf16", {name: seconds * 1e3 for name, seconds in found.items()}
        self._report.add(f"{row}: a step without weights", milliseconds["tiny"], "ms", against=milliseconds["ours"])
        share = 100 * found["tiny"] / found["ours"]
        self._report.add(f"{row}: Python and scheduling", share, "% of step", goal="value < 3")


def kind_for(peer: Peer, goals: Goals) -> str:
    return goals.openvino_kind if peer.name == OPENVINO else goals.kind


def gemv_bytes_per_s() -> float:
    """Return the bytes per second of an int8 product whose weights are larger than any cache."""
    num_out, num_in = 65536, 4096
    values = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8)
    make, _ = choose("auto", True, torch.bfloat16)
    kernel = make(IntWeight(8, values, torch.ones(num_out, 1), num_in, activations="dynamic"), None)
    x = torch.randn(1, num_in).bfloat16()
    return kernel.num_bytes / limits.best_seconds(lambda: kernel(x))


def measure(report: Report, quick: bool, parts: Collection[str], folder: Path) -> None:
    """Add all rows of the Llama and of the demo model."""
    num_layers = QUICK_LAYERS if quick else LLAMA.num_layers
    peers = open_peers(folder, num_layers)
    if not peers:
        print(f"no {peers_python()} (make bench-peers makes it): our rows stand alone")
    try:
        bench = Bench(report, quick, peers, LLAMA, num_layers, GOALS, LIMIT_SHARE, BATCHES)
        bench.overhead()
        if "demo" in parts:
            bench.demo()
        forms = [name for name in (QUICK_FORMS if quick else FORMS) if name in parts]
        if any(name in TRANSFORMERS_GOALS for name in forms):
            bench.best_transformers()
        for name in forms:
            bench.form(name)
            gc.collect()
        if "not-exact" in parts:
            bench.not_exact()
        bench.limits()
    finally:
        for peer in peers:
            peer.close()


def measure_mixture(report: Report, quick: bool, folder: Path) -> None:
    """Add the rows of the mixture; `weights read` are the experts that a token uses, and everything else."""
    num_layers = QUICK_LAYERS if quick else MIXTURE.num_layers
    peers = open_mixture_peers(folder, num_layers)
    try:
        bench = Bench(
            report, quick, peers, MIXTURE, num_layers, MIXTURE_GOALS, MIXTURE_LIMIT_SHARE, batches=(), kind="mixture, "
        )
        for name in MIXTURE_GOALS:
            bench.form(name)
            gc.collect()
        bench.limits()
    finally:
        for peer in peers:
            peer.close()


def main() -> int:
    arguments, report = start(
        "cpu", "Prefill and decode of the CPU engine against llama.cpp, OpenVINO and transformers.", PARTS
    )
    torch.set_num_threads(NUM_THREADS)
    parts = set(arguments.only)
    with tempfile.TemporaryDirectory() as folder:
        if parts - {"mixture"}:
            measure(report, arguments.quick, parts, Path(folder))
    if "mixture" in parts:
        with tempfile.TemporaryDirectory() as folder:
            measure_mixture(report, arguments.quick, Path(folder))
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
