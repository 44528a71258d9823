"""The grammars of constraints, compiled in a thread of their own: what waits for one waits alone, and tenants take
turns."""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from baton.constraints.constraint import Constraint
from baton.constraints.frames import MAX_CPU_S
from baton.constraints.grammar import Grammar, Vocabulary
from baton.fairness import RoundRobin
from baton.gguf import GGUFError
from baton.tokenizer.tokenizer_file import read_tokenizer_json

NUM_KEPT = 64  # those used last; a usual one takes 100 KB
_TURN_S = 0.1  # of the thread; who was away has saved as much as the dearest constraint takes

logger = logging.getLogger(__name__)


class Grammars:
    """Thread-safe."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        # Starts it: where that cannot be, no worker starts, and no constraint fails of it later.
        self._thread.submit(int).result()
        self._kept: OrderedDict[Constraint, Future[Grammar]] = OrderedDict()
        self._num_users: dict[Future[Grammar], Counter[bytes]] = {}  # by tenant
        self._lines: dict[bytes, dict[Future[Grammar], Constraint]] = {}  # of tenants, with what is to be compiled
        self._turns = RoundRobin[bytes](_TURN_S, MAX_CPU_S)
        self._lock = Lock()

    def compile(self, constraint: Constraint, tenant: bytes) -> Future[Grammar]:
        """Return a constraint's grammar, as soon as it is compiled, when it is the tenant's turn; leave it once. The
        future raises BadConstraint."""
        with self._lock:
            grammar = self._kept.get(constraint)
            if grammar is None or grammar.cancelled():
                grammar = self._kept[constraint] = Future()
            if not grammar.running() and not grammar.done():
                self._lines.setdefault(tenant, {})[grammar] = constraint
                self._thread.submit(self._compile_next)
            self._kept.move_to_end(constraint)
            while len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
            self._num_users.setdefault(grammar, Counter())[tenant] += 1
            return grammar

    def leave(self, grammar: Future[Grammar], tenant: bytes) -> None:
        """Let go of a grammar: no turn of a tenant is for what it waits for no more, and what nobody waits for is not
        compiled."""
        with self._lock:
            num_users = self._num_users[grammar]
            num_users[tenant] -= 1
            if not num_users[tenant]:
                del num_users[tenant]
                self._take(grammar, {tenant})
            if not num_users:
                del self._num_users[grammar]
                grammar.cancel()

    def _compile_next(self) -> None:
        """Compile what is next, if anything is left."""
        with self._lock:
            self._turns.wait(self._lines)
            if (tenant := self._turns.next(self._lines)) is None:
                return
            grammar, constraint = next(iter(self._lines[tenant].items()))
            self._take(grammar, self._num_users[grammar].keys())
            grammar.set_running_or_notify_cancel()
        begun_at = time.monotonic()
        try:
            grammar.set_result(self.vocabulary.compile(constraint))
        except BaseException as error:  # a panic of the library too
            grammar.set_exception(error)
        with self._lock:
            self._turns.charge(tenant, time.monotonic() - begun_at)

    def _take(self, grammar: Future[Grammar], tenants: Iterable[bytes]) -> None:
        """Take a grammar out of the lines of those tenants."""
        for tenant in tenants:
            if line := self._lines.get(tenant):
                line.pop(grammar, None)
                if not line:
                    del self._lines[tenant]


def read_grammars(model: Path, vocab_size: int) -> Grammars | None:
    """Read the vocabulary of a model folder or .gguf file; None where there are no grammars over it."""
    try:
        return Grammars(Vocabulary(read_tokenizer_json(model), vocab_size))
    except (OSError, GGUFError, ValueError) as error:
        logger.warning("answers cannot be kept to constraints: %s", error)
        return None
