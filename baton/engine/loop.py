"""Run an engine in a thread of its own. The time of the last loop tells whether the worker is healthy."""

import logging
import threading
import time
from collections.abc import Callable

import torch

from baton import system
from baton.engine.core.device import is_lost
from baton.engine.core.request import Output
from baton.engine.engine import Engine
from baton.engine.parallel.collectives import RankLost
from baton.lines import one_line

ENGINE_THREAD = "engine-loop"  # threads that compute with it have the same name
IDLE_BEAT_S = 0.25  # an idle loop still checks deadlines and updates `last_beat`

logger = logging.getLogger(__name__)


class EngineLoop:
    """Owns the thread that steps an engine. Commands (submit, start, cancel and others) wake it.

    The callbacks run on that thread. `on_outputs` gets the non-empty outputs of each step, and in mid-step the progress
    of held prefills; it must neither block nor raise. `on_device_lost(reason)` is called when the GPU fails
    permanently, `on_broken(reason)` when the blocks of a failed step cannot be released; both end the process.
    """

    def __init__(
        self,
        engine: Engine,
        on_outputs: Callable[[list[Output]], None],
        on_device_lost: Callable[[str], None] = lambda reason: None,
        on_broken: Callable[[str], None] = lambda reason: None,
    ):
        self.engine = engine
        self._on_device_lost, self._on_broken = on_device_lost, on_broken
        engine.on_progress = on_outputs
        self.last_beat = time.monotonic()  # falls behind while a step stalls
        self._on_outputs = on_outputs
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=ENGINE_THREAD, daemon=True)

    @property
    def step_number(self) -> int:
        """The number of steps since the engine was made."""
        return self.engine.step_number

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop after the running step, waiting at most `timeout_s`. Live keys stay as they are. Idempotent."""
        self._stopping.set()
        self.engine.inbox.ring()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        system.name_thread(ENGINE_THREAD)
        if self.engine.config.threads is not None:
            torch.set_num_threads(self.engine.config.threads)
        while not self._stopping.is_set():
            self.last_beat = time.monotonic()
            outputs = self._step()
            if outputs:
                self._on_outputs(outputs)
            elif not self.engine.has_computed:
                # Nothing to compute, or all waiting sequences lack blocks: releasing some wakes the loop.
                self.engine.runner.threads.rest()
                self.engine.inbox.wait(IDLE_BEAT_S)

    def _step(self) -> list[Output]:
        try:
            return self.engine.step()
        except RankLost:
            # The watcher of ranks ends this process. No key ends before: their streams continue on other workers.
            self._stopping.wait()
            return []
        except Exception as error:  # whatever the error, the step's keys end and others are served
            logger.exception("engine step %d failed", self.engine.step_number)
            reason = one_line(error)
            if is_lost(self.engine.pool.device):
                self._on_device_lost(reason)
            return self._fail(f"engine step failed: {type(error).__name__}: {reason}")

    def _fail(self, reason: str) -> list[Output]:
        """End the keys of a failed step. If that fails too, holders of blocks are wrong, and the process must end."""
        try:
            return self.engine.fail(reason)
        except Exception as error:
            logger.exception("what the failed step held cannot be given back")
            self._on_broken(f"{type(error).__name__}: {error}")
            raise
