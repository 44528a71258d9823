"""The reference: one Engine in this process, no gateway, no worker, no transfer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Key, PrefillDone, Request, RequestEnded, TokenRun
from baton.engine.engine import Engine
from baton.sampling_params import SamplingParams


@dataclass
class BareChoice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, first_index: int, token_ids: Sequence[int], logprobs: Sequence, finish_reason) -> None:
        assert first_index == len(self.token_ids), "tokens out of order"
        self.token_ids.extend(token_ids)
        self.logprobs.extend((*entry.chosen, tuple(entry.top)) for entry in logprobs)
        if finish_reason is not None:
            self.finish_reason = finish_reason.name


def load_engine(model: Path, **config) -> Engine:
    return Engine.load(EngineConfig(model=model, **config))


def make_request(request_id: str, prompt_ids: Sequence[int], *, max_tokens: int, eos_ids=(), **sampling) -> Request:
    """Without span hashes: nothing is found in, or goes into, the prefix cache."""
    return Request(
        key=Key(request_id),
        token_ids=tuple(prompt_ids),
        num_prompt_tokens=len(prompt_ids),
        sampling=SamplingParams(**sampling),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(eos_ids),
    )


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, dict[int, BareChoice]]:
    """Submits all at once and steps until every one has ended; choices by index, by request id."""
    results: dict[str, dict[int, BareChoice]] = {request.key.request_id: {} for request in requests}
    for request in requests:
        engine.submit(request)
    num_open = len(requests)
    while num_open:
        for output in engine.step():
            if isinstance(output, RequestEnded):
                assert not output.error, f"{output.key}: {output.error} {output.message}"
                num_open -= 1
                continue
            choices = results[output.key.request_id]
            if isinstance(output, PrefillDone):
                for first in output.first_tokens:
                    logprobs = [first.logprobs] if first.logprobs else []
                    choices[first.choice] = BareChoice()
                    choices[first.choice].add(0, [first.token_id], logprobs, first.finish_reason)
            elif isinstance(output, TokenRun):
                choices[output.choice].add(output.first_index, output.token_ids, output.logprobs, output.finish_reason)
    return results
