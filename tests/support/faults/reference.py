"""The undisturbed answer: one engine in this process, one request at a time, no worker, no transfer, no fault."""

import itertools
from pathlib import Path

from tests.support import bare_engine
from tests.support.client import Prompt
from tests.support.faults.history import prompt_hash


class Reference:
    """Tokens that do not depend on where and how a request ran: greedy, or seeded. Answers are kept: the tokens of a
    shorter one are the first of a longer."""

    def __init__(self, model: Path):
        self._engine = bare_engine.load_engine(model, num_blocks=160, threads=1)
        self._known: dict[tuple, dict[int, list[int]]] = {}
        self._names = map(str, itertools.count())

    def tokens(self, prompt_ids: Prompt, max_tokens: int, sampling: dict) -> dict[int, list[int]]:
        """By choice."""
        key = (prompt_hash(prompt_ids), tuple(sorted(sampling.items())))
        known = self._known.get(key)
        if known is None or len(known[0]) < max_tokens:
            request = bare_engine.bare_request(next(self._names), prompt_ids, max_tokens=max_tokens, **sampling)
            (choices,) = bare_engine.serve_alone(self._engine, [request]).values()
            known = self._known[key] = {index: choice.token_ids for index, choice in choices.items()}
        return {index: ids[:max_tokens] for index, ids in known.items()}
