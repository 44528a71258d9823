"""What engines gave out, in records by key, and engines run until nothing is left."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.core.request import FinishReason, Output, PrefillDone, Progress, Request, RequestEnded, TokenRun
from baton.engine.engine import Engine


@dataclass
class Record:
    """All that came out for one key."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    logprobs: dict[int, list] = field(default_factory=dict)
    progress: list[int] = field(default_factory=list)
    first: PrefillDone | None = None
    ended: RequestEnded | None = None

    def answer(self) -> dict[int, tuple[list[int], FinishReason]]:
        return {choice: (tokens, self.reasons[choice]) for choice, tokens in self.tokens.items()}


class Collector(dict):
    """Records by key, checking the order of everything: nothing after the end, one end, no index missed."""

    def __init__(self, first_index: int = 0):
        self.base = first_index

    def __missing__(self, key) -> Record:
        self[key] = Record()
        return self[key]

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            record = self[output.key]
            assert record.ended is None, f"{output} after the end"
            match output:
                case RequestEnded():
                    record.ended = output
                case Progress():
                    assert not record.progress or output.upto_token > record.progress[-1]
                    record.progress.append(output.upto_token)
                case PrefillDone():
                    assert record.first is None
                    record.first = output
                    for first in output.first_tokens:
                        self._add(record, first.choice, [first.token_id], [first.logprobs], first.finish_reason)
                case TokenRun():
                    made = len(record.tokens[output.choice]) if output.choice in record.tokens else 0
                    assert output.first_index == self.base + made, "an index missed or repeated"
                    self._add(record, output.choice, output.token_ids, output.logprobs, output.finish_reason)

    def _add(self, record, choice, token_ids, logprobs, reason):
        assert choice not in record.reasons, "a token after the choice finished"
        record.tokens.setdefault(choice, []).extend(token_ids)
        record.logprobs.setdefault(choice, []).extend(entry for entry in logprobs if entry is not None)
        if reason is not None:
            record.reasons[choice] = reason


def run_to_end(engine: Engine, requests: Sequence[Request] = (), collector: Collector | None = None) -> Collector:
    """Submit all and step until nothing is left, checking integrity after every step."""
    records = Collector() if collector is None else collector
    for request in requests:
        engine.submit(request)
    for _ in range(5000):
        if not engine.has_work():
            return records
        records.take(engine.step())
        engine.check_integrity()
    raise AssertionError(f"not done after 5000 steps: {engine.load_report()}")
