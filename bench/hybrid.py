"""Measure a hybrid on the CPU: python bench/hybrid.py [--quick] [--json FILE].

Random models of Granite 4's kind, nine layers of Mamba-2 and one of attention, and of Qwen3-Next's, nine of gated delta
net, without experts, beside a dense one of the same sizes with attention in all ten. Time of a prompt by its length, in
CPU time of the process; memory of a sequence by its length. `against` of a length is that of 1,024 tokens in the same
round, of a size the dense model's.
"""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from bench.lib.report import Report, finish, start
from tests.support.engine.collector import run_to_end
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import make_folder

LENGTHS = (1024, 2048, 4096, 8192)
LAYERS = 10
SIZES = dict(
    vocab_size=4096, intermediate_size=2048, num_hidden_layers=LAYERS, max_position_embeddings=16384, eos_token_id=2
)  # fmt: skip
HYBRID = dict(layer_types=["mamba"] * 5 + ["attention"] + ["mamba"] * 4, shared_intermediate_size=2048)
DELTA_NET = dict(
    layer_types=["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 4, head_dim=64,
    linear_key_head_dim=64, linear_value_head_dim=64, mlp_only_layers=list(range(LAYERS)),
)  # fmt: skip
FAMILIES = {"hybrid": "granite-4", "delta net": "qwen3-next", "dense": "granite"}
ROUNDS, QUICK_ROUNDS = 2, 1
MIB = 1 << 20


def load(folder: Path, family: str, hidden: int) -> Engine:
    """Return an engine over a random model in bf16 with heads of 64 elements."""
    heads = hidden // 64
    changes = SIZES | dict(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=heads // 4)
    if family == "granite-4":
        changes |= HYBRID | dict(mamba_n_heads=2 * heads, mamba_d_head=64, mamba_d_state=128)
    if family == "qwen3-next":
        changes |= DELTA_NET | dict(linear_num_key_heads=heads, linear_num_value_heads=2 * heads)
    make_folder(folder / family, family, torch.bfloat16, **changes)
    return Engine.load(
        EngineConfig(
            folder / family, max_num_seqs=1, num_blocks=(LENGTHS[-1] + 64) // 32, max_model_len=LENGTHS[-1] + 64
        )
    )


def read(engine: Engine, num_tokens: int, seed: int) -> float:
    """Return the CPU seconds of a prompt and its first token."""
    ids = torch.randint(3, SIZES["vocab_size"], (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    begin = time.process_time()
    run_to_end(engine, [engine_request(f"{num_tokens}-{seed}", ids, 1)])
    return time.process_time() - begin


def compare_lengths(report: Report, name: str, engine: Engine, rounds: int) -> None:
    """Add a row for each length, in microseconds per token."""
    read(engine, LENGTHS[0], 0)
    spent: dict[int, list[float]] = {length: [] for length in (*LENGTHS, 0)}
    for turn in range(rounds):
        for length in (*LENGTHS, 0):  # 0: the first length again
            num_tokens = length or LENGTHS[0]
            spent[length].append(read(engine, num_tokens, 1 + 10 * turn + len(spent[length]) + length) / num_tokens)
    base = median(spent[LENGTHS[0]])
    for length in LENGTHS[1:]:
        goal = "ratio <= 1.15" if name != "dense" and length == LENGTHS[-1] else ""
        value = median(spent[length])
        report.add(
            f"{name}: CPU time of a token, prompt of {length:,}", value * 1e6, "us", against=base * 1e6, goal=goal
        )
    report.add(f"{name}: A/A, prompt of 1,024", median(spent[0]) * 1e6, "us", against=base * 1e6)


def compare_memory(report: Report, name: str, engine: Engine, dense: Engine) -> None:
    for length in LENGTHS:
        ours, theirs = (sequence_bytes(each, length) for each in (engine, dense))
        report.add(f"{name}: KV and state of a sequence of {length:,}", ours / MIB, "MiB", against=theirs / MIB)
    report.add(f"{name}: state of a sequence", engine.layout.state_bytes / MIB, "MiB")


def sequence_bytes(engine: Engine, num_tokens: int) -> int:
    return engine.layout.num_blocks(num_tokens) * engine.layout.block_bytes + engine.layout.state_bytes


def main() -> int:
    arguments, report = start("hybrid", "A hybrid's prompts and memory, by length, beside a dense model.")
    hidden, rounds = (512, QUICK_ROUNDS) if arguments.quick else (1024, ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        engines = {name: load(Path(folder), family, hidden) for name, family in FAMILIES.items()}
        for name in ("hybrid", "delta net"):
            compare_memory(report, name, engines[name], engines["dense"])
        for name, engine in engines.items():
            compare_lengths(report, name, engine, rounds)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
