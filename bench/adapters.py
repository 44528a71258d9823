"""Decode with LoRA adapters against the model without: python bench/adapters.py [--quick] [--json FILE].

One bare engine on this CPU, a random Llama of 101 M parameters, 16 sequences at once: all without an adapter, all with
one, and with 8 adapters of rank 16 on all seven linears in turn, interleaved; all with the same prompts in a round.
"""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from baton.engine.engine import Engine
from baton.training.model.llama import ModelConfig
from bench.lib.random_model import write_random_model
from bench.lib.report import Report, finish, interleave, start
from tests.support import bare_engine

MODEL = ModelConfig(16_384, 1_024, 4_096, num_layers=5, num_heads=16, num_kv_heads=4, head_dim=64, max_length=1_024)
NUM_ADAPTERS, RANK, BATCH = 8, 16, 16
PROMPT, OUTPUT = 8, 64  # tokens
NUM_THREADS = 2
MODULES = {
    "self_attn.q_proj": (1_024, 1_024), "self_attn.k_proj": (1_024, 256), "self_attn.v_proj": (1_024, 256),
    "self_attn.o_proj": (1_024, 1_024), "mlp.gate_proj": (1_024, 4_096), "mlp.up_proj": (1_024, 4_096),
    "mlp.down_proj": (4_096, 1_024),
}  # fmt: skip


def write_adapter(folder: Path, seed: int) -> Path:
    """Write a random adapter of it, as PEFT does."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer, (module, (size_in, size_out)) in itertools.product(range(MODEL.num_layers), MODULES.items()):
        name = f"base_model.model.model.layers.{layer}.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, size_in, generator=draw) / size_in**0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(size_out, RANK, generator=draw) / RANK
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": [name.split(".")[1] for name in MODULES],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Bench:
    """One engine that holds all adapters."""

    def __init__(self, folder: Path):
        model = write_random_model(folder / "model", MODEL)
        self.engine: Engine = bare_engine.load_engine(model, threads=NUM_THREADS, num_blocks=512, max_num_seqs=BATCH)
        self.identities = [
            self.engine.add_adapter(f"a{index}", write_adapter(folder / f"a{index}", index))
            for index in range(NUM_ADAPTERS)
        ]
        self._request_ids = map(str, itertools.count())

    def arm(self, adapters: Sequence[bytes]) -> Callable[[], tuple[float, float]]:
        rounds = itertools.count()
        return lambda: self._seconds(adapters, random.Random(next(rounds)))

    def _seconds(self, adapters: Sequence[bytes], rng: random.Random) -> tuple[float, float]:
        """Return wall and CPU seconds of a batch whose sequences use the adapters in turn."""
        prompts = [[rng.randrange(5, MODEL.vocab_size) for _ in range(PROMPT)] for _ in range(BATCH)]
        requests = [
            replace(bare_engine.bare_request(next(self._request_ids), ids, max_tokens=OUTPUT), adapter=adapter)
            for ids, adapter in zip(prompts, itertools.cycle(adapters), strict=False)
        ]
        begun = time.perf_counter(), time.process_time()
        bare_engine.serve_alone(self.engine, requests)
        return time.perf_counter() - begun[0], time.process_time() - begun[1]


def compare(report: Report, bench: Bench, num_rounds: int) -> None:
    """Compare one and eight adapters with none; eight adapters have the goal."""
    kinds = {"none": [b""], "none again": [b""], "one": bench.identities[:1], "eight": bench.identities}
    arms = {name: bench.arm(adapters) for name, adapters in kinds.items()}
    interleave(arms, 1)  # warm
    measured = interleave(arms, num_rounds)
    for unit, which in (("tokens/s", 0), ("tokens/CPU s", 1)):
        found = {name: BATCH * OUTPUT / median(each[which] for each in rounds) for name, rounds in measured.items()}
        goal = "ratio >= 0.85" if unit == "tokens/s" else ""
        for name, its_goal in (("eight", goal), ("one", "")):
            label = f"batch {BATCH}, {name} adapter{'s' * (name == 'eight')} of rank {RANK} over none"
            report.add(label, found[name], unit, against=found["none"], goal=its_goal)
        report.add(f"batch {BATCH}: A/A, none over none", found["none again"], unit, against=found["none"])


def main() -> int:
    arguments, report = start("adapters", "LoRA adapters in one batch, against the model without.")
    with tempfile.TemporaryDirectory() as folder:
        compare(report, Bench(Path(folder)), 3 if arguments.quick else 15)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
