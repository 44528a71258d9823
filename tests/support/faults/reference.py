"""The undisturbed answer: one engine in this process, one request at a time, no worker, no transfer, no fault."""

import itertools
from collections.abc import Collection
from pathlib import Path

from tests.support import bare_engine
from tests.support.client import Prompt
from tests.support.faults.history import prompt_hash


class Reference:
    """Answers that do not depend on where and how a request ran: greedy, or seeded."""

    def __init__(self, model: Path):
        self._engine = bare_engine.load_engine(model, num_blocks=160, threads=1)
        self._known: dict[tuple, dict[int, list[int]]] = {}
        self._names = map(str, itertools.count())

    def choices(
        self, prompt_ids: Prompt, max_tokens: int, sampling: dict, eos_ids: Collection[int] = ()
    ) -> dict[int, bare_engine.BareChoice]:
        """Return the whole answer of every choice, without stop strings."""
        request = bare_engine.bare_request(
            next(self._names), prompt_ids, max_tokens=max_tokens, eos_ids=eos_ids, **sampling
        )
        (choices,) = bare_engine.serve_alone(self._engine, [request]).values()
        return choices

    def tokens(self, prompt_ids: Prompt, max_tokens: int, sampling: dict) -> dict[int, list[int]]:
        """Return the tokens of every choice. They are kept: those of a shorter answer are the first of a longer."""
        key = (prompt_hash(prompt_ids), tuple(sorted(sampling.items())))
        known = self._known.get(key)
        if known is None or len(known[0]) < max_tokens:
            choices = self.choices(prompt_ids, max_tokens, sampling)
            known = self._known[key] = {index: choice.token_ids for index, choice in choices.items()}
        return {index: ids[:max_tokens] for index, ids in known.items()}
