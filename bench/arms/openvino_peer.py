"""OpenVINO GenAI as a peer of bench/cpu.py (gguf_peer.py): python -m bench.arms.openvino_peer FOLDER NUM_LAYERS.

With its defaults: continuous batching over paged KV in 8 bits, and bf16 arithmetic if the processor has it."""

import gc
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai

from bench.arms.gguf_peer import NUM_THREADS, serve
from bench.arms.shape import VOCAB_SIZE

CACHE_GIB, MAX_BATCHED_TOKENS = 1, 1024


class OpenVinoModel:
    """One file, loaded into a pipeline with continuous batching."""

    def __init__(self, path: Path):
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_batched_tokens = CACHE_GIB, MAX_BATCHED_TOKENS
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": NUM_THREADS}
        self._pipeline = genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", properties)

    def seconds(self, batch_size: int, num_prompt: int, num_steps: int) -> list[float]:
        rng = np.random.default_rng(1)
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max(1, num_steps + 1), True, False
        handles = [
            self._pipeline.add_request(
                index, openvino.Tensor(rng.integers(258, VOCAB_SIZE, (1, num_prompt)).astype(np.int64)), config
            )
            for index in range(batch_size)
        ]
        steps = [self._step()]  # the first step reads all prompts
        while self._pipeline.has_non_finished_requests():
            steps.append(self._step())
        del handles
        return steps[1:] if num_steps else steps[:1]

    def _step(self) -> float:
        begun = time.perf_counter()
        self._pipeline.step()
        return time.perf_counter() - begun

    def close(self) -> None:
        del self._pipeline
        gc.collect()


if __name__ == "__main__":
    serve(OpenVinoModel)
