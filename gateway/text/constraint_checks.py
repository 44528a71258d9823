"""Check constraints in separate processes, one for each check that runs: a check that takes too long or too much memory
ends with its process, and delays no other."""

import contextlib
import hashlib
import json
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from io import BufferedReader, BufferedWriter
from typing import cast
from weakref import WeakSet

from baton.constraints.constraint import BadConstraint, Constraint, grammar_of
from baton.constraints.frames import MAX_CPU_S, write_frame
from baton.service.errors import Unavailable

_MAX_WAIT_S = 5 * MAX_CPU_S  # on a busy machine
_START_S = 60.0  # the vocabulary is read
_RETRY_AFTER_S = 1.0
_NUM_KEPT = 1024  # answers, 100 bytes each


class ConstraintChecks:
    """A pool of processes that check constraints against one vocabulary. Thread-safe.

    A process is started when a check finds none idle, or earlier by `start`; `close` ends all of them."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int):
        """Check for a tokenizer and a model of `vocab_size` ids, which may be fewer than the tokenizer's."""
        self._vocabulary = vocab_size.to_bytes(8, "little") + tokenizer_json
        self._idle: list[_Checker] = []  # last in, first out: more than one is seldom needed
        self._processes: WeakSet[_Checker] = WeakSet()
        self._known: OrderedDict[bytes, tuple[str, str]] = (
            OrderedDict()
        )  # (place, reason) by digest; ("", ""): it is good
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self) -> None:
        """Start a process before a constraint needs one. A failure is ignored: the next check meets it again and
        reports it."""
        with contextlib.suppress(Unavailable):
            process, _ = self._acquire()
            self._release(process)

    def known(self, constraint: Constraint, tenant: str) -> tuple[str, str] | None:
        """Return the remembered result of a check as (place, reason), or None if the constraint was not checked yet for
        this tenant: how soon an answer comes tells nobody what others have asked."""
        with self._lock:
            return self._known.get(_digest(constraint, tenant))

    def check(self, constraint: Constraint, tenant: str) -> tuple[str, str]:
        """Return what is wrong with a constraint as (place, reason), or ("", "") if it is good. Takes seconds at most.

        Raises Unavailable if the check could not be made; that is not remembered."""
        if (problem := self.known(constraint, tenant)) is not None:
            return problem
        try:
            grammar_of(constraint)  # raises what is wrong without compiling it
            problem = self._ask(constraint)
        except BadConstraint as error:
            problem = error.path, error.reason
        with self._lock:
            self._known[_digest(constraint, tenant)] = problem
            while len(self._known) > _NUM_KEPT:
                self._known.popitem(last=False)
        return problem

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._is_closed = True
            for process in self._processes:
                process.close()

    def _ask(self, constraint: Constraint) -> tuple[str, str]:
        process, problem = self._acquire()
        if problem != ("", ""):
            return problem
        if (problem := process.ask(json.dumps(constraint).encode(), _MAX_WAIT_S)) is None:
            if process.close() == -signal.SIGKILL:  # by us, or by a kernel out of memory: not the constraint's fault
                raise Unavailable("the constraint could not be checked in time", _RETRY_AFTER_S)
            return "", f"takes more than {MAX_CPU_S:g} s or too much memory to compile: make it simpler"
        self._release(process)
        return problem

    def _acquire(self) -> tuple["_Checker", tuple[str, str]]:
        """Return a process for this caller alone, and what is wrong with the vocabulary as (place, reason). Raises
        Unavailable."""
        with self._lock:
            if self._is_closed:
                raise Unavailable("constraints are checked no more", _RETRY_AFTER_S)
            while self._idle:
                if (process := self._idle.pop()).is_alive:
                    return process, ("", "")
            try:
                process = _Checker()
            except OSError as error:  # no memory, descriptors or processes are left
                problem = f"the process that checks constraints cannot be started: {error.strerror}"
                raise Unavailable(problem, _RETRY_AFTER_S) from None
            self._processes.add(process)
        if (problem := process.ask(self._vocabulary, _START_S)) is None:
            process.close()
            raise Unavailable("the process that checks constraints did not start", _RETRY_AFTER_S)
        if problem != ("", ""):
            process.close()
        return process, problem

    def _release(self, process: "_Checker") -> None:
        with self._lock:
            self._idle.append(process)


class _Checker:
    """A process that runs baton.constraints.checker."""

    def __init__(self):
        argv = [sys.executable, "-m", "baton.constraints.checker"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._stdin = cast(BufferedWriter, self._process.stdin)
        self._stdout = cast(BufferedReader, self._process.stdout)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, frame: bytes, within_s: float) -> tuple[str, str] | None:
        """Send a frame; return the answer as (place, reason), or None if none comes within `within_s` seconds."""
        deadline = time.monotonic() + within_s
        try:
            write_frame(self._stdin, frame)
            head = self._read(8, deadline)
            found = self._read(int.from_bytes(head, "little"), deadline)
        except (OSError, EOFError, ValueError):  # ValueError: the pipe is closed
            return None
        place, reason = json.loads(found)
        return place, reason

    def close(self) -> int:
        """Kill the process; return its exit status, which is -SIGKILL if it had not ended by itself. Idempotent."""
        self._process.kill()
        with contextlib.suppress(OSError):  # bytes were written and never read
            self._stdin.close()
        self._stdout.close()
        return self._process.wait()

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        """Return the next `num_bytes` bytes. Raises EOFError if the process has ended, TimeoutError at the deadline."""
        found, stream = b"", self._stdout
        while len(found) < num_bytes:
            if not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            piece = stream.read1(num_bytes - len(found))
            if not piece:
                raise EOFError
            found += piece
        return found


def _digest(constraint: Constraint, tenant: str) -> bytes:
    return hashlib.sha256(json.dumps((tenant, constraint)).encode()).digest()
