"""What the peers of bench/cpu.py that read .gguf files share: the file, and one JSON line in, one out.

{"type": "Q8_0", "batch_size": 1, "num_prompt": 512, "num_steps": 0}  ->  {"seconds": [...]}

`seconds` are those of the prompt if num_steps is 0, else of every step that decodes one token of each of batch_size
sequences in parallel. Runs in .venv-peers (make bench-peers), without torch."""

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import gguf
import numpy as np

from bench.arms.shape import LLAMA, MIXTURE, ROPE_THETA, VOCAB_SIZE, Shape

NUM_THREADS = 2
DISTINCT_ROWS = 512  # of a matrix, which repeats them: numpy takes many seconds to round a whole vocabulary
MAX_CONTEXT = 8192
FILE_TYPES = {
    gguf.GGMLQuantizationType.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    gguf.GGMLQuantizationType.F16: gguf.LlamaFileType.MOSTLY_F16,
    gguf.GGMLQuantizationType.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    gguf.GGMLQuantizationType.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
}


class Model(Protocol):
    """One file, loaded by a peer."""

    def seconds(self, batch_size: int, num_prompt: int, num_steps: int) -> list[float]: ...
    def close(self) -> None: ...


def serve(load: Callable[[Path], Model]) -> None:
    """Answer the lines of stdin: `python -m MODULE FOLDER NUM_LAYERS [mixture]`. The file of a type is written into
    FOLDER on its first request."""
    folder, num_layers, shape = Path(sys.argv[1]), int(sys.argv[2]), MIXTURE if "mixture" in sys.argv[3:] else LLAMA
    loaded: dict[str, Model] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        kind = asked.pop("type")
        if kind not in loaded:
            for model in loaded.values():
                model.close()
            path = folder / f"{kind}.gguf"
            if not path.exists():
                write(path, gguf.GGMLQuantizationType[kind], shape, num_layers)
            loaded = {kind: load(path)}
        print(json.dumps({"seconds": loaded[kind].seconds(**asked)}), flush=True)


def write(path: Path, kind: gguf.GGMLQuantizationType, shape: Shape, num_layers: int) -> None:
    """Write a Llama, or a Qwen3-MoE. Layers share their random values, and so do experts, but not their memory."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen3moe" if shape.num_experts else "llama")
    writer.add_context_length(MAX_CONTEXT)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(shape.ffn_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(FILE_TYPES[kind])
    if shape.num_experts:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        writer.add_expert_count(shape.num_experts)
        writer.add_expert_used_count(shape.num_chosen)
        writer.add_expert_feed_forward_length(shape.ffn_size)
    _add_tokenizer(writer)

    def matrix(num_out: int, num_in: int) -> np.ndarray:
        distinct = min(DISTINCT_ROWS, num_out)
        rows = rng.standard_normal((distinct, num_in), dtype=np.float32) * 0.02
        return np.tile(gguf.quants.quantize(rows, kind), (num_out // distinct, 1))

    def add(name: str, data: np.ndarray) -> None:
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    hidden, queries, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    add("token_embd", matrix(VOCAB_SIZE, hidden))
    add("output", matrix(VOCAB_SIZE, hidden))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    attention = {"attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
    layer = {name: matrix(*size) for name, size in (attention | {"attn_output": (hidden, queries)}).items()}
    mlp = {
        "ffn_gate": (shape.ffn_size, hidden),
        "ffn_up": (shape.ffn_size, hidden),
        "ffn_down": (hidden, shape.ffn_size),
    }
    for name, size in mlp.items():
        data = matrix(*size)
        layer |= {f"{name}_exps": np.stack([data] * shape.num_experts)} if shape.num_experts else {name: data}
    plain = {"attn_norm": np.ones(hidden, np.float32), "ffn_norm": np.ones(hidden, np.float32)}
    if shape.num_experts:
        plain |= {f"attn_{name}_norm": np.ones(shape.head_dim, np.float32) for name in "qk"}
        plain["ffn_gate_inp"] = rng.standard_normal((shape.num_experts, hidden), dtype=np.float32) * 0.02
    for index in range(num_layers):
        for name, data in layer.items():
            add(f"blk.{index}.{name}", data)
        for name, data in plain.items():
            writer.add_tensor(f"blk.{index}.{name}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Add a byte-level BPE of VOCAB_SIZE tokens: OpenVINO needs one to read the file, though nothing is tokenized."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters for bytes
    letters = [*map(chr, printable), *(chr(256 + index) for index in range(256 - len(printable)))]
    pairs = itertools.islice(itertools.product(letters, letters), max(0, VOCAB_SIZE - 258))
    merges = [f"{a} {b}" for a, b in pairs]
    tokens = [*letters, "<s>", "</s>", *(merge.replace(" ", "") for merge in merges)][:VOCAB_SIZE]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    control = {256, 257}  # without control tokens OpenVINO does not build its detokenizer
    writer.add_token_types(
        [gguf.TokenType.CONTROL if index in control else gguf.TokenType.NORMAL for index in range(len(tokens))]
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
