"""The reference: one Engine in this process, no gateway, no worker, no transfer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Key, PrefillDone, Request, RequestEnded, TokenRun
from baton.engine.engine import Engine
from baton.sampling_params import SamplingParams
from tests.support.client import Reply


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


def bare_request(request_id: str, prompt_ids: Sequence[int], *, max_tokens: int, eos_ids=(), **sampling) -> Request:
    """Return a request without span hashes: nothing is found in, or goes into, the prefix cache."""
    return Request(
        key=Key(request_id),
        token_ids=tuple(prompt_ids),
        num_prompt_tokens=len(prompt_ids),
        sampling=SamplingParams(**sampling),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(eos_ids),
    )


def serve_alone(engine: Engine, requests: Sequence[Request]) -> dict[str, dict[int, BareChoice]]:
    """Submit all at once and step until every one has ended; returns choices by index, by request id."""
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


def assert_same(reply: Reply, whole: dict[int, BareChoice]) -> None:
    """Check that a client got what an engine alone makes, logprobs too."""
    assert sorted(reply.choices) == sorted(whole)
    for index, choice in whole.items():
        got = reply.choices[index]
        assert got.token_ids == choice.token_ids
        assert got.finish_reason == choice.finish_reason
        assert _flat(got.logprobs) == _flat(choice.logprobs)


def _flat(logprobs: list[tuple]) -> list[tuple]:
    """Return logprobs as the wire carries them: float32."""
    return [
        (token_id, float(np.float32(value)), tuple((best, float(np.float32(worth))) for best, worth in top))
        for token_id, value, top in logprobs
    ]


def answer_alone(model, token_ids, max_tokens, **sampling) -> dict[int, list[int]]:
    """Return the tokens of every choice of one request, by an engine made for it."""
    engine = load_engine(model, num_blocks=160, threads=1)
    request = Request(Key("bare"), tuple(token_ids), len(token_ids), SamplingParams(**sampling), max_tokens)
    return {index: choice.token_ids for index, choice in serve_alone(engine, [request])["bare"].items()}
