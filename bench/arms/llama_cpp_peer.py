"""llama.cpp as a peer of bench/cpu.py: runs in .venv-peers (make bench-peers), one JSON line in, one out.

    python -m bench.arms.llama_cpp_peer FOLDER NUM_LAYERS
    {"type": "Q8_0", "batch_size": 1, "num_prompt": 512, "num_steps": 0}  ->  {"seconds": [...]}

Writes the .gguf file of a type into FOLDER when it is first asked for: random weights, no vocabulary. `seconds`: of the
prompt where num_steps is 0, else of every step that decodes one token of each of batch_size sequences in parallel.
"""

import json
import sys
import time
from pathlib import Path

import gguf
import llama_cpp as llama
import numpy as np

from bench.arms.shape import FFN_SIZE, HEAD_DIM, HIDDEN_SIZE, NUM_HEADS, NUM_KV_HEADS, ROPE_THETA, VOCAB_SIZE

NUM_THREADS = 2
DISTINCT_ROWS = 512  # of a matrix, which repeats them: rounding a whole vocabulary takes numpy many seconds
MAX_CONTEXT, MAX_BATCH = 8192, 512
TYPES = {
    "BF16": gguf.GGMLQuantizationType.BF16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
}


def write(path: Path, kind: gguf.GGMLQuantizationType, num_layers: int) -> None:
    """A Llama of shape.py; the layers share their random values, not their memory."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(MAX_CONTEXT)
    writer.add_embedding_length(HIDDEN_SIZE)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(FFN_SIZE)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("no_vocab")

    def matrix(num_out: int, num_in: int) -> np.ndarray:
        rows = rng.standard_normal((DISTINCT_ROWS, num_in), dtype=np.float32) * 0.02
        return np.tile(gguf.quants.quantize(rows, kind), (num_out // DISTINCT_ROWS, 1))

    def add(name: str, data: np.ndarray) -> None:
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    add("token_embd", matrix(VOCAB_SIZE, HIDDEN_SIZE))
    add("output", matrix(VOCAB_SIZE, HIDDEN_SIZE))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN_SIZE, np.float32))
    shapes = {
        "attn_q": (NUM_HEADS * HEAD_DIM, HIDDEN_SIZE),
        "attn_k": (NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
        "attn_v": (NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
        "attn_output": (HIDDEN_SIZE, NUM_HEADS * HEAD_DIM),
        "ffn_gate": (FFN_SIZE, HIDDEN_SIZE),
        "ffn_up": (FFN_SIZE, HIDDEN_SIZE),
        "ffn_down": (HIDDEN_SIZE, FFN_SIZE),
    }
    layer = {name: matrix(*shape) for name, shape in shapes.items()}
    for index in range(num_layers):
        for name, data in layer.items():
            add(f"blk.{index}.{name}", data)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{index}.{name}.weight", np.ones(HIDDEN_SIZE, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Model:
    """One file, loaded with the defaults of llama.cpp, and a context for up to 32 sequences."""

    def __init__(self, path: Path):
        self._model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = MAX_CONTEXT, MAX_BATCH, MAX_BATCH, 32
        params.n_threads = params.n_threads_batch = NUM_THREADS
        params.kv_unified = True  # the better of the two for sequences of unequal length
        self._context = llama.llama_init_from_model(self._model, params)
        self._batch = llama.llama_batch_init(MAX_BATCH, 0, 1)
        if not self._model or not self._context:
            sys.exit(f"llama.cpp does not load {path.name}")

    def seconds(self, batch_size: int, num_prompt: int, num_steps: int) -> list[float]:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        rng = np.random.default_rng(1)
        prefill = 0.0
        for seq in range(batch_size):
            ids = rng.integers(5, VOCAB_SIZE, num_prompt).tolist()
            prefill = self._decode([(token, i, seq, i == num_prompt - 1) for i, token in enumerate(ids)])
        if not num_steps:
            return [prefill]
        return [
            self._decode([(7 + seq, num_prompt + step, seq, True) for seq in range(batch_size)])
            for step in range(num_steps)
        ]

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> float:
        """(token id, position, sequence, wants logits) each; seconds."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, seq, logits) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = seq, logits
        begun = time.perf_counter()
        if llama.llama_decode(self._context, batch):
            sys.exit("llama.cpp could not decode")
        llama.llama_synchronize(self._context)
        return time.perf_counter() - begun

    def close(self) -> None:
        llama.llama_batch_free(self._batch)
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)


def main() -> None:
    folder, num_layers = Path(sys.argv[1]), int(sys.argv[2])
    silent = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(silent, None)
    llama.llama_backend_init()
    loaded: dict[str, Model] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        kind = asked.pop("type")
        if kind not in loaded:
            for model in loaded.values():
                model.close()
            path = folder / f"{kind}.gguf"
            write(path, TYPES[kind], num_layers)
            loaded = {kind: Model(path)}
        print(json.dumps({"seconds": loaded[kind].seconds(**asked)}), flush=True)


if __name__ == "__main__":
    main()
