"""Compile the grammars of constraints in a thread of their own; tenants take turns."""

import logging
import time
from collections import Counter, OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from baton.constraints.constraint import Constraint
from baton.constraints.frames import MAX_CPU_S
from baton.constraints.grammar import Grammar, Vocabulary
from baton.fairness import RoundRobin
from baton.gguf import GGUFError
from baton.tokenizer.tokenizer_file import read_tokenizer_json

NUM_KEPT = 64  # grammars kept, the last used ones; a usual one takes 100 KB
_TURN_S = 0.1  # of the thread; a tenant may save up turns as long as the most expensive constraint takes

logger = logging.getLogger(__name__)


class Grammars:
    """Compiled grammars of one vocabulary, shared by the requests of a tenant: how soon one begins tells nobody what
    constraints others use. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        # Starts the thread now, so that a host without threads left fails at start and not at the first constraint.
        self._thread.submit(int).result()
        self._kept: OrderedDict[tuple[bytes, Constraint], Future[Grammar]] = OrderedDict()  # by tenant
        self._num_users: Counter[Future[Grammar]] = Counter()
        self._lines: dict[bytes, dict[Future[Grammar], Constraint]] = {}  # by tenant: what is to be compiled, in order
        self._turns = RoundRobin[bytes](_TURN_S, MAX_CPU_S)
        self._lock = Lock()

    def compile(self, constraint: Constraint, tenant: bytes) -> Future[Grammar]:
        """Return a future of a constraint's grammar, which raises BadConstraint. Call `leave` once for every call."""
        with self._lock:
            key = tenant, constraint
            grammar = self._kept.get(key)
            if grammar is None or grammar.cancelled():
                grammar = self._kept[key] = Future()
            if not grammar.running() and not grammar.done():
                self._lines.setdefault(tenant, {})[grammar] = constraint
                self._thread.submit(self._compile_next)
            self._kept.move_to_end(key)
            while len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
            self._num_users[grammar] += 1
            return grammar

    def leave(self, grammar: Future[Grammar], tenant: bytes) -> None:
        """Stop using a grammar of this tenant. It is not compiled any more if no request uses it."""
        with self._lock:
            self._num_users[grammar] -= 1
            if not self._num_users[grammar]:
                del self._num_users[grammar]
                self._take(grammar, tenant)
                grammar.cancel()

    def _compile_next(self) -> None:
        """Compile the next constraint, if any is left."""
        with self._lock:
            self._turns.wait(self._lines)
            if (tenant := self._turns.next(self._lines)) is None:
                return
            grammar, constraint = next(iter(self._lines[tenant].items()))
            self._take(grammar, tenant)
            grammar.set_running_or_notify_cancel()
        begun_at = time.monotonic()
        try:
            grammar.set_result(self.vocabulary.compile(constraint))
        except BaseException as error:  # also a panic of the library
            grammar.set_exception(error)
        with self._lock:
            self._turns.charge(tenant, time.monotonic() - begun_at)

    def _take(self, grammar: Future[Grammar], tenant: bytes) -> None:
        """Remove a grammar from what is to be compiled for its tenant."""
        if line := self._lines.get(tenant):
            line.pop(grammar, None)
            if not line:
                del self._lines[tenant]


def read_grammars(model: Path, vocab_size: int) -> Grammars | None:
    """Return grammars over the vocabulary of a model folder or .gguf file, or None if it has no usable tokenizer."""
    try:
        return Grammars(Vocabulary(read_tokenizer_json(model), vocab_size))
    except (OSError, GGUFError, ValueError) as error:
        logger.warning("answers cannot be kept to constraints: %s", error)
        return None
