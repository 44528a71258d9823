"""llama.cpp as a peer of bench/cpu.py (gguf_peer.py): python -m bench.arms.llama_cpp_peer FOLDER NUM_LAYERS
[mixture]."""

import sys
import time
from pathlib import Path

import llama_cpp as llama
import numpy as np

from bench.arms.gguf_peer import MAX_CONTEXT, NUM_THREADS, serve
from bench.arms.shape import VOCAB_SIZE

MAX_BATCH = 512


class LlamaCppModel:
    """One file, loaded with llama.cpp's defaults, and a context for up to 32 sequences."""

    def __init__(self, path: Path):
        self._model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = MAX_CONTEXT, MAX_BATCH, MAX_BATCH, 32
        params.n_threads = params.n_threads_batch = NUM_THREADS
        params.kv_unified = True  # the better setting for sequences of unequal length
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
        """Decode entries (token id, position, sequence, wants logits); return the seconds."""
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
    silent = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(silent, None)
    llama.llama_backend_init()
    serve(LlamaCppModel)


if __name__ == "__main__":
    main()
