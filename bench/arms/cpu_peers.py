"""The peers of bench/cpu.py: llama.cpp and OpenVINO in their own processes, transformers in this one. Times are in
seconds."""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.arms.shape import LLAMA, VOCAB_SIZE
from bench.lib.paths import ROOT

LLAMA_CPP, OPENVINO = "llama.cpp", "OpenVINO"


class Peer:
    """llama.cpp or OpenVINO in a process of its own (gguf_peer.py)."""

    def __init__(self, name: str, module: str, folder: Path, num_layers: int, *kind: str):
        self.name = name
        command = [peers_python(), "-m", f"bench.arms.{module}", folder, str(num_layers), *kind]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def prefill_s(self, kind: str, num_prompt: int) -> float:
        return self._ask(type=kind, batch_size=1, num_prompt=num_prompt, num_steps=0)[0]

    def step_s(self, kind: str, batch_size: int, num_prompt: int, num_steps: int) -> float:
        steps = self._ask(type=kind, batch_size=batch_size, num_prompt=num_prompt, num_steps=num_steps)
        return statistics.median(steps[2:])

    def _ask(self, **question) -> list[float]:
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}'s process ended")
        return json.loads(line)["seconds"]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)


def peers_python() -> Path:
    """Return the interpreter of the peers' environment: built for the tier of BATON_ISA, or for this machine."""
    cap = os.environ.get("BATON_ISA")
    return ROOT / (f".venv-peers-{cap}" if cap else ".venv-peers") / "bin" / "python"


def open_peers(folder: Path, num_layers: int) -> list[Peer]:
    """Start llama.cpp and OpenVINO if `make bench-peers` has installed them. OpenVINO chooses its instructions itself,
    so it has no rows if BATON_ISA limits ours."""
    if not peers_python().exists():
        return []
    llama_cpp = Peer(LLAMA_CPP, "llama_cpp_peer", folder, num_layers)
    return (
        [llama_cpp] if "BATON_ISA" in os.environ else [llama_cpp, Peer(OPENVINO, "openvino_peer", folder, num_layers)]
    )


def open_mixture_peers(folder: Path, num_layers: int) -> list[Peer]:
    """Start llama.cpp with the mixture if it is installed."""
    return [Peer(LLAMA_CPP, "llama_cpp_peer", folder, num_layers, "mixture")] if peers_python().exists() else []


class Transformers:
    """LlamaForCausalLM with its defaults (SDPA, a dynamic cache)."""

    def __init__(self, num_layers: int, dtype: torch.dtype):
        from transformers import LlamaConfig, LlamaForCausalLM  # from the extra `test`

        config = LlamaConfig(
            vocab_size=VOCAB_SIZE, hidden_size=LLAMA.hidden_size, intermediate_size=LLAMA.ffn_size,
            num_hidden_layers=num_layers, num_attention_heads=LLAMA.num_heads, num_key_value_heads=LLAMA.num_kv_heads,
            head_dim=LLAMA.head_dim, max_position_embeddings=1024, tie_word_embeddings=False,
        )  # fmt: skip
        self.name = f"transformers {str(dtype).removeprefix('torch.')}"
        self._model = LlamaForCausalLM._from_config(config, dtype=dtype).eval()

    @torch.inference_mode()
    def prefill_s(self, num_prompt: int) -> float:
        ids = torch.randint(5, VOCAB_SIZE, (1, num_prompt))
        return timed(lambda: self._model(ids, logits_to_keep=1))

    @torch.inference_mode()
    def step_s(self, num_prompt: int, num_steps: int) -> float:
        ids = torch.randint(5, VOCAB_SIZE, (1, num_prompt))
        cache = self._model(ids, logits_to_keep=1).past_key_values
        token = torch.tensor([[7]])
        steps = [timed(lambda: self._model(token, past_key_values=cache).logits.argmax(-1)) for _ in range(num_steps)]
        return statistics.median(steps[2:])


def timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun
