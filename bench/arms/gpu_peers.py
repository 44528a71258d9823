"""Other engines on the same GPU: the same shape with random weights, and tokens per second of plain decoding."""

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.arms import gpu_arms

GOALS = {
    "vLLM": {1: "ratio >= 1.15", 64: "ratio >= 1.0", 256: "ratio >= 1.0"},
    "transformers": {1: "ratio >= 3.0", 64: "ratio >= 3.0"},
}
_PACKAGES = {"vLLM": "vllm", "transformers": "transformers"}

Rates = dict[int, float]  # tokens/s by batch size


def missing() -> dict[str, str]:
    """Return why a peer is not measured, by peer."""
    return {name: "not installed" for name, package in _PACKAGES.items() if importlib.util.find_spec(package) is None}


def installed() -> dict[str, Callable[[int, Sequence[int], int], Rates]]:
    """Return run(context, batch sizes, steps) by peer."""
    known = {"vLLM": vllm, "transformers": transformers}
    return {name: run for name, run in known.items() if name not in missing()}


def config() -> dict:
    num_layers, hidden, inner, num_heads, num_kv_heads, head_dim, vocab = gpu_arms.LLAMA_8B
    return dict(
        architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=num_layers, hidden_size=hidden,
        intermediate_size=inner, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, head_dim=head_dim,
        vocab_size=vocab, max_position_embeddings=8192, rope_theta=500000.0, rms_norm_eps=1e-5, torch_dtype="bfloat16",
        tie_word_embeddings=False, hidden_act="silu",
    )  # fmt: skip


def vllm(num_context: int, sizes: Sequence[int], num_steps: int) -> Rates:
    """Measure vLLM with its own CUDA graphs; the time of a run without the steps is subtracted."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config()))
        engine = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=max(sizes),
            enable_prefix_caching=False, gpu_memory_utilization=0.8,
        )  # fmt: skip

        def seconds(size: int, num_tokens: int) -> float:
            prompts = [{"prompt_token_ids": torch.randint(5, 100_000, (num_context,)).tolist()} for _ in range(size)]
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
            begun = time.perf_counter()
            engine.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - begun

        return {size: _rate(lambda count, size=size: seconds(size, count), size, num_steps) for size in sizes}


def transformers(num_context: int, sizes: Sequence[int], num_steps: int) -> Rates:
    """Measure transformers with its default attention and cache, up to 64 sequences."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**config()), torch_dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def seconds(size: int, num_tokens: int) -> float:
        ids = torch.randint(5, 100_000, (size, num_context), device="cuda")
        torch.cuda.synchronize()
        begun = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
                       do_sample=False, pad_token_id=0)  # fmt: skip
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    return {size: _rate(lambda count, size=size: seconds(size, count), size, num_steps) for size in sizes if size <= 64}


def _rate(seconds: Callable[[int], float], size: int, num_steps: int) -> float:
    seconds(2)
    short, long = seconds(2), seconds(2 + num_steps)
    return size * num_steps / (long - short)
