"""The grammars of constraints, compiled in a thread of their own: what waits for one waits alone."""

import logging
from collections import Counter, OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from baton.constraints.constraint import Constraint
from baton.constraints.grammar import Grammar, Vocabulary
from baton.gguf import GGUFError
from baton.tokenizer.tokenizer_file import read_tokenizer_json

NUM_KEPT = 64  # those used last; a usual one takes 100 KB

logger = logging.getLogger(__name__)


class Grammars:
    """Thread-safe."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._kept: OrderedDict[Constraint, Future[Grammar]] = OrderedDict()
        self._num_users = Counter[Future[Grammar]]()
        self._lock = Lock()

    def compile(self, constraint: Constraint) -> Future[Grammar]:
        """Return a constraint's grammar, as soon as it is compiled; leave it once. The future raises BadConstraint."""
        with self._lock:
            grammar = self._kept.get(constraint)
            if grammar is None or grammar.cancelled():
                grammar = self._kept[constraint] = self._thread.submit(self.vocabulary.compile, constraint)
            self._kept.move_to_end(constraint)
            while len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
            self._num_users[grammar] += 1
            return grammar

    def leave(self, grammar: Future[Grammar]) -> None:
        """Let go of a grammar: what nobody waits for any more is not compiled, and keeps nobody waiting."""
        with self._lock:
            self._num_users[grammar] -= 1
            if not self._num_users[grammar]:
                del self._num_users[grammar]
                grammar.cancel()


def read_grammars(model: Path, vocab_size: int) -> Grammars | None:
    """Read the vocabulary of a model folder or .gguf file; None where there are no grammars over it."""
    try:
        return Grammars(Vocabulary(read_tokenizer_json(model), vocab_size))
    except (OSError, GGUFError, ValueError) as error:
        logger.warning("answers cannot be kept to constraints: %s", error)
        return None
