"""Run one batch through a bare engine, and return its tokens with their times from when the last prompt was read."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.engine.core.request import PrefillDone, Request, RequestEnded, Speculation, TokenRun
from baton.engine.engine import Engine
from tests.support import bare_engine


@dataclass(frozen=True)
class Decoded:
    """Tokens, and times from when the last prompt was read; `total_s` from the beginning."""

    answers: list[list[int]]
    num_tokens: int
    decode_s: float
    decode_cpu_s: float  # of this process, all threads
    total_s: float
    num_proposed: int
    num_accepted: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.decode_s

    @property
    def tokens_per_cpu_s(self) -> float:
        """Return tokens per second of CPU time: not what clients see, but unaffected by other load on the core."""
        return self.num_tokens / self.decode_cpu_s


def greedy(names, prompts: Sequence[Sequence[int]], num_output: int, width: int | None) -> list[Request]:
    """Return greedy requests named by `names`, one per prompt. `width`: proposals in every step; None: as many as pay
    off."""
    speculation = Speculation(num_tokens=width)
    requests = [bare_engine.bare_request(str(next(names)), prompt, max_tokens=num_output) for prompt in prompts]
    return [replace(request, speculation=speculation) for request in requests]


def decode(engine: Engine, requests: Sequence[Request], on_read: Callable[[], None] = lambda: None) -> Decoded:
    """Submit all requests and run them to the end; `on_read` is called when the last prompt has been read."""
    answers: dict[str, list[int]] = {request.key.request_id: [] for request in requests}
    num_reading = num_open = len(requests)
    num_tokens = num_proposed = num_accepted = 0
    begun = read = time.perf_counter()
    read_cpu = time.process_time()
    for request in requests:
        engine.submit(request)
    while num_open:
        for output in engine.step():
            match output:
                case PrefillDone():
                    answers[output.key.request_id].append(output.first_tokens[0].token_id)
                    num_reading -= 1
                case TokenRun():
                    answers[output.key.request_id] += output.token_ids
                    num_tokens += len(output.token_ids)
                case RequestEnded():
                    assert not output.error, output
                    num_open -= 1
                    num_proposed += output.report.num_draft_tokens
                    num_accepted += output.report.num_accepted_tokens
        if num_reading == 0:  # from here on it only decodes
            num_reading, num_tokens = -1, 0
            on_read()
            read, read_cpu = time.perf_counter(), time.process_time()
    ended, ended_cpu = time.perf_counter(), time.process_time()
    made = list(answers.values())
    return Decoded(made, num_tokens, ended - read, ended_cpu - read_cpu, ended - begun, num_proposed, num_accepted)
