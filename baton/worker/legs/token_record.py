"""Keep the tokens of a leg for a gateway that lost its stream and continues after the tokens that it has.

All token ids are kept, a few KB per sequence; logprobs, which are much larger, only of the last tokens.
"""

from collections.abc import Iterator, Sequence

from baton.engine.core.request import FinishReason, FirstToken, Key, Request, TokenLogprobs, TokenRun

KEPT_LOGPROBS = 4096  # per choice, at least; more than a session or a client may leave unread


class _Choice:
    __slots__ = ("token_ids", "logprobs", "num_dropped", "finish_reason")

    def __init__(self, token_ids: Sequence[int]):
        self.token_ids = list(token_ids)
        self.logprobs: list[TokenLogprobs] = []
        self.num_dropped = len(self.token_ids)  # leading tokens whose logprobs are not kept
        self.finish_reason: FinishReason | None = None


class TokenRecord:
    """The tokens of one leg by choice. A choice that is missing ended with its first token, where the prompt was
    read."""

    def __init__(self, request: Request, first_tokens: Sequence[FirstToken]):
        self._has_logprobs = request.sampling.logprobs is not None
        known = request.token_ids[request.num_prompt_tokens :]  # the output of earlier attempts
        self._choices: dict[int, _Choice] = {}
        for first in first_tokens:
            self._choices[first.choice] = _Choice(known)
            logprobs = (first.logprobs,) if first.logprobs is not None else ()
            self._add(self._choices[first.choice], (first.token_id,), logprobs, first.finish_reason)

    def add(self, run: TokenRun) -> None:
        self._add(self._choices[run.choice], run.token_ids, run.logprobs, run.finish_reason)

    def reaches(self, next_index: Sequence[int]) -> bool:
        """Return whether all tokens from these output indices on (one index per choice) are kept here or still to
        come."""
        for choice, index in enumerate(next_index):
            known = self._choices.get(choice)
            if known is None:
                if index != 1:
                    return False
            elif index > len(known.token_ids) or (self._has_logprobs and index < known.num_dropped):
                return False
        return True

    def num_tokens(self, num_choices: int) -> list[int]:
        """Return how many output tokens there are of each choice."""
        known = map(self._choices.get, range(num_choices))
        return [1 if choice is None else len(choice.token_ids) for choice in known]

    def since(self, key: Key, next_index: Sequence[int]) -> Iterator[TokenRun]:
        """Yield runs of `key` from these output indices on."""
        for choice, index in enumerate(next_index):
            known = self._choices.get(choice)
            if known is not None and index < len(known.token_ids):
                logprobs = tuple(known.logprobs[index - known.num_dropped :]) if self._has_logprobs else ()
                yield TokenRun(key, choice, index, tuple(known.token_ids[index:]), logprobs, known.finish_reason)

    def _add(self, choice: _Choice, token_ids, logprobs, finish_reason: FinishReason | None) -> None:
        choice.token_ids += token_ids
        choice.finish_reason = finish_reason
        if self._has_logprobs:
            choice.logprobs += logprobs
            if len(choice.logprobs) > 2 * KEPT_LOGPROBS:
                num_dropped = len(choice.logprobs) - KEPT_LOGPROBS
                del choice.logprobs[:num_dropped]
                choice.num_dropped += num_dropped
