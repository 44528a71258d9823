"""Arms of bench/gpu.py: an engine with random weights of the Llama-3.1-8B shape. Times are in seconds."""

import math
import statistics
import time
from dataclasses import replace

from baton.cli.gpu.random_engine import LLAMA_8B, RandomEngine
from baton.engine.core.request import PrefillDone, TokenRun
from kvtransfer.naming import SpanHash, chain_hashes
from tests.support import bare_engine

ROOT = SpanHash(b"root" * 8)


class Ours(RandomEngine):
    """An engine with random weights, and its measurements."""

    def prefill_s(self, num_prompt: int, ids: list[int] | None = None) -> float:
        """Return the seconds from submit to the first token."""
        self.engine.submit(self.request(ids or self.ids(num_prompt), 1))
        begun = time.perf_counter()
        while not any(isinstance(each, PrefillDone) for each in self.engine.step()):
            pass
        seconds = time.perf_counter() - begun
        self.finish()
        return seconds

    def steps_s(self, batch_size: int, num_prompt: int, num_steps: int, least_steps: int = 3) -> list[float]:
        """Return the seconds of each step in which every sequence decodes, around the given context, without the first
        steps."""
        num_output = num_steps + least_steps + self.num_prefill_steps(batch_size, num_prompt) + 2
        for _ in range(batch_size):
            self.engine.submit(self.request(self.ids(num_prompt), num_output))
        seconds: list[float] = []
        while len(seconds) < num_steps + least_steps:
            begun = time.perf_counter()
            outputs = self.engine.step()
            if sum(isinstance(each, TokenRun) for each in outputs) == batch_size:
                seconds.append(time.perf_counter() - begun)
        self.finish()
        return seconds[least_steps:]

    def step_s(self, batch_size: int, num_prompt: int, num_steps: int) -> float:
        return statistics.median(self.steps_s(batch_size, num_prompt, num_steps))

    def replay_s(self, batch_size: int, num_runs: int) -> float:
        """Return the seconds of the bare graph of a decode step, replayed on its last inputs."""
        times = []
        for _ in range(num_runs):
            begun = time.perf_counter()
            self.launcher.replay(batch_size)
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    def tokens(self, prompts: list[list[int]], num_output: int) -> list[list[int]]:
        """Return greedy answers to prompts that run concurrently."""
        requests = [self.request(ids, num_output) for ids in prompts]
        answers = bare_engine.serve_alone(self.engine, requests)
        return [answers[request.key.request_id][0].token_ids for request in requests]

    def hit_s(self, num_prompt: int) -> tuple[float, float]:
        """Return the seconds to the first token of a prompt, cold and fully cached."""
        ids = self.ids(num_prompt)
        hashes = tuple(chain_hashes(ROOT, ids))
        found = []
        for _ in range(2):
            request = replace(self.request(ids, 1), span_hashes=hashes, chain_parent=hashes[-1])
            begun = time.perf_counter()
            bare_engine.serve_alone(self.engine, [request])
            found.append(time.perf_counter() - begun)
        return found[0], found[1]

    def num_prefill_steps(self, batch_size: int, num_prompt: int) -> int:
        room = self.config.max_num_batched_tokens - batch_size
        return math.ceil(batch_size * num_prompt / max(room // 64 * 64, 64)) + batch_size


def prefill_flops(num_tokens: int, sizes: tuple[int, ...] = LLAMA_8B) -> float:
    """Return the FLOPs of one prompt: projections of every token, the output head for the last one, the causal half of
    attention."""
    num_layers, hidden, inner, num_heads, num_kv_heads, head_dim, vocab = sizes
    layer = hidden * (2 * num_heads + 2 * num_kv_heads) * head_dim + 3 * hidden * inner
    attention = 4 * num_layers * num_heads * head_dim * num_tokens**2 / 2
    return 2 * num_layers * layer * num_tokens + 2 * vocab * hidden + attention
