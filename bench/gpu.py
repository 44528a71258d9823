"""The GPU engine against the roof of its GPU: python bench/gpu.py [--quick] [--only PART ...] [--json FILE].

Llama-3.1-8B's shape with random weights; every row beside its own limit, measured in the same run: the copy bandwidth
for what is bound by bytes, the rate of an 8192^3 product for what is bound by arithmetic. Parts:

    decode      batch 1, context 1k, in every weight form        batches     64 and 256, bf16
    kv          batch 64, context 8k, in every KV form           prefill     2k, 8k, 32k, bf16 and fp8
    overhead    an engine's step over the bare graph             hit         a prompt that is cached
    exact       batch-invariant against not, and flips           interfere   prefill and decode on one GPU
    peers       vLLM and transformers, where they are installed

Without a CUDA device it prints one line and ends with 2. --quick: fewer steps, and fewer weight and KV forms.
"""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import random
import statistics
import sys

import torch

from baton.engine.core.device import MultiprocessorShare
from bench.arms import gpu_arms, gpu_interference, gpu_peers
from bench.lib import gpu_limits
from bench.lib.report import Report, finish, start

PARTS = ("decode", "batches", "kv", "prefill", "overhead", "hit", "exact", "interfere", "peers")
CONTEXT, LONG_CONTEXT = 1024, 8192
FORM_GOALS = {"int4-g128": "ratio >= 2.5", "fp8": "ratio >= 1.7", "int8": "ratio >= 1.7"}
KV_GOALS = {"int8": "ratio >= 1.5", "fp8_e4m3": "ratio >= 1.5", "int4": "ratio >= 1.8"}
PREFILL_GOALS = {2048: "ratio >= 0.80", 8192: "ratio >= 0.80", 32768: "ratio >= 0.75"}
FLIP_TOKENS, FLIP_PROMPTS = 64, 32


class Bench:
    """The rows of one run."""

    def __init__(self, report: Report, limits: gpu_limits.GpuLimits, quick: bool):
        self._report, self._limits, self._quick = report, limits, quick
        self._device = torch.device("cuda")
        self._num_steps = 20 if quick else 64

    def decode(self) -> None:
        """Measure batch 1: bf16 against the copy bandwidth, other forms against bf16."""
        forms = ("bf16", "int4-g128") if self._quick else gpu_arms.FORMS
        bf16_s = None
        for form in forms:
            ours = self._ours(form, max_num_seqs=8)
            seconds = ours.step_s(1, CONTEXT, self._num_steps)
            again = ours.step_s(1, CONTEXT, self._num_steps)
            self._bytes_row(
                f"decode, batch 1, {form}", ours, 1, CONTEXT, seconds, "ratio >= 0.88" if form == "bf16" else ""
            )
            self._report.add(f"decode, batch 1, {form}: A/A", again * 1e3, "ms", against=seconds * 1e3)
            if form == "bf16":
                bf16_s = seconds
                self._report.add("decode, batch 1, bf16: TPOT", seconds * 1e3, "ms")
            else:
                self._speedup(f"decode, batch 1, {form}: over bf16", bf16_s, seconds, FORM_GOALS[form])
            ours.close()

    def batches(self) -> None:
        ours = self._ours("bf16")
        for batch_size in (64,) if self._quick else (64, 256):
            seconds = ours.step_s(batch_size, CONTEXT, self._num_steps)
            self._bytes_row(f"decode, batch {batch_size}, bf16", ours, batch_size, CONTEXT, seconds, "ratio >= 0.80")
        ours.close()

    def kv(self) -> None:
        """Measure context 8k at batch 64, where KV is most of what a step reads."""
        bf16_s = None
        for form in ("bf16", "int8") if self._quick else ("bf16", *KV_GOALS):
            ours = self._ours("bf16", kv=form, max_num_seqs=64, context=LONG_CONTEXT + 512)
            seconds = ours.step_s(64, LONG_CONTEXT, self._num_steps)
            self._bytes_row(f"decode, batch 64, context 8k, kv {form}", ours, 64, LONG_CONTEXT, seconds, "")
            if form == "bf16":
                bf16_s = seconds
            else:
                self._speedup(f"decode, batch 64, context 8k, kv {form}: over bf16", bf16_s, seconds, KV_GOALS[form])
            ours.close()

    def prefill(self) -> None:
        bf16_s = {}
        for form in ("bf16",) if self._quick else ("bf16", "fp8"):
            ours = self._ours(form, max_num_seqs=8, context=33_000)
            for num_prompt, goal in PREFILL_GOALS.items():
                ours.prefill_s(num_prompt)
                seconds = statistics.median(ours.prefill_s(num_prompt) for _ in range(2 if self._quick else 5))
                flops, row = gpu_arms.prefill_flops(num_prompt) / seconds, f"prefill {num_prompt}, {form}"
                limit = self._limits.bf16_flops if form == "bf16" else self._limits.fp8_flops
                against = limit / 1e12 if limit else None
                self._report.add(row, flops / 1e12, "TFLOP/s", against=against, goal=goal if form == "bf16" else "")
                if form == "bf16":
                    bf16_s[num_prompt] = seconds
                else:
                    self._speedup(f"{row}: over bf16", bf16_s[num_prompt], seconds, "ratio >= 1.5")
            ours.close()

    def overhead(self) -> None:
        """Measure everything around the graph: scheduling, inputs, sampling, results."""
        for name, sizes, goal in (("8B", gpu_arms.LLAMA_8B, "1.03"), ("0.6B", gpu_arms.QWEN_600M, "1.15")):
            ours = gpu_arms.Ours("bf16", self._device, sizes, context=2048)
            if not ours.launcher.num_graphs:
                print(f"overhead, {name}: not measured, attention {ours.model.attention.name} has no graphs")
            for batch_size in (1, 64, 256) if ours.launcher.num_graphs else ():
                seconds = ours.step_s(batch_size, CONTEXT, self._num_steps)
                bare = ours.replay_s(batch_size, self._num_steps)
                row = f"{name}, batch {batch_size}: engine step over its graph"
                self._report.add(row, seconds * 1e3, "ms", against=bare * 1e3, goal=f"ratio <= {goal}")
                ours.launcher.overlaps = False
                alone = ours.step_s(batch_size, CONTEXT, self._num_steps)
                ours.launcher.overlaps = True
                self._report.add(f"{row}, one step in flight", alone * 1e3, "ms", against=bare * 1e3)
            ours.close()

    def hit(self) -> None:
        ours = self._ours("bf16", max_num_seqs=8, context=LONG_CONTEXT + 512)
        ours.hit_s(LONG_CONTEXT)
        cold, hit = (
            statistics.median(each) for each in zip(*(ours.hit_s(LONG_CONTEXT) for _ in range(3)), strict=True)
        )
        self._report.add("prefix hit, 8k: TTFT over cold", hit * 1e3, "ms", against=cold * 1e3, goal="ratio <= 0.05")
        ours.close()

    def exact(self) -> None:
        prompts = [[random.Random(seed).randrange(5, 100_000) for _ in range(64)] for seed in range(FLIP_PROMPTS)]
        steps_s = {}
        for exact in (False, True):
            ours, name = self._ours("bf16", exact=exact, max_num_seqs=64), "exact" if exact else "fast"
            steps_s[exact] = {size: ours.step_s(size, CONTEXT, self._num_steps) for size in (1, 64)}
            together = ours.tokens(prompts, FLIP_TOKENS)
            alone = [ours.tokens([prompt], FLIP_TOKENS)[0] for prompt in prompts]
            flipped = sum(a != b for a, b in zip(together, alone, strict=True))
            self._report.add(
                f"{name} mode: answers of {FLIP_TOKENS} tokens that a batch of {FLIP_PROMPTS} changes",
                100 * flipped / FLIP_PROMPTS, "%", goal="value <= 0" if exact else "",
            )  # fmt: skip
            ours.close()
        for size, seconds in steps_s[True].items():
            fast = steps_s[False][size]
            self._report.add(
                f"batch {size}: TPOT exact over fast", seconds * 1e3, "ms", against=fast * 1e3, goal="ratio <= 1.25"
            )

    def interfere(self) -> None:
        """Decode here while another process on the same GPU reads prompts of 8k, on all multiprocessors and on a
        share."""
        print(f"Multi-Process Service: {'runs' if gpu_interference.has_mps() else 'not here, processes take turns'}")
        self._interfere("", None)
        share = gpu_interference.PREFILL_SHARE
        try:
            MultiprocessorShare(torch.device("cuda", torch.cuda.current_device()), share)
        except ValueError as error:
            print(f"interference with a share: not measured, {error}")
        else:
            self._interfere(f", prefill on {share:.0%} of the multiprocessors", share)

    def _interfere(self, how: str, sm_share: float | None) -> None:
        found = gpu_interference.measure(self._quick, sm_share)
        row = f"interference{how}: p99 TPOT with prefill beside it"
        self._report.add(row, found.loaded_p99_s * 1e3, "ms", against=found.idle_p99_s * 1e3, goal="ratio <= 1.3")
        row = f"interference{how}: prefill with decode beside it"
        self._report.add(row, found.loaded_prefill, "tokens/s", against=found.solo_prefill, goal="ratio >= 0.6")

    def peers(self) -> None:
        """Compare the peers' rates with ours, in the same run."""
        peers = gpu_peers.installed()
        for name, why in gpu_peers.missing().items():
            print(f"{name}: not measured, {why}")
        if not peers:
            return
        ours = self._ours("bf16")
        sizes = (1, 64, 256)
        rates = {size: size / ours.step_s(size, CONTEXT, self._num_steps) for size in sizes}
        ours.close()
        for name, run in peers.items():
            for size, rate in run(CONTEXT, sizes, self._num_steps).items():
                goal = gpu_peers.GOALS[name].get(size, "")
                self._report.add(f"decode, batch {size}: over {name}", rates[size], "tokens/s", against=rate, goal=goal)

    def _ours(self, form: str, **options):
        return gpu_arms.Ours(form, self._device, **options)

    def _bytes_row(self, row: str, ours, batch_size: int, context: int, seconds: float, goal: str) -> None:
        num_bytes = ours.weight_bytes + batch_size * context * ours.token_bytes
        limit = self._limits.bytes_per_s / 1e9
        self._report.add(f"{row}: bytes read", num_bytes / seconds / 1e9, "GB/s", against=limit, goal=goal)

    def _speedup(self, row: str, base_s: float, seconds: float, goal: str) -> None:
        self._report.add(row, 1 / seconds, "1/s", against=1 / base_s, goal=goal)


def main() -> int:
    if why := gpu_limits.missing():
        print(f"bench/gpu.py: needs a CUDA device: {why}", file=sys.stderr)
        return 2
    arguments, report = start("gpu", "The GPU engine against the limits of its GPU.", PARTS)
    bench = Bench(report, gpu_limits.measure(report), arguments.quick)
    for part in arguments.only:
        getattr(bench, part)()
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
