"""The engine's own thread: commands, a step, outputs, again. Its beat is the health of the worker."""

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

ENGINE_THREAD = "engine-loop"  # and those that compute with it
IDLE_BEAT_S = 0.25  # an idle loop still looks at deadlines and says that it lives

logger = logging.getLogger(__name__)


class EngineLoop:
    """Owns the thread that steps an engine. `on_outputs` is called on it, with the non-empty outputs of each step (and
    in mid-step with how far a held prompt is written), and must neither block nor raise; submit, start, cancel and the
    like wake it by themselves. `on_device_lost(reason)` is called on it when the GPU fails for good,
    `on_broken(reason)` when what a failed step held cannot be given back; they end the process."""

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
        self.last_beat = time.monotonic()  # a stalled step leaves it behind
        self._on_outputs = on_outputs
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=ENGINE_THREAD, daemon=True)

    @property
    def step_number(self) -> int:
        """Steps that have passed since the engine was made."""
        return self.engine.step_number

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Lets the running step end; keys that still live stay as they are. Idempotent."""
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
                # Nothing to compute, or all that waits lacks blocks: giving some back rings the bell.
                self.engine.runner.threads.rest()
                self.engine.inbox.wait(IDLE_BEAT_S)

    def _step(self) -> list[Output]:
        try:
            return self.engine.step()
        except RankLost:
            # Who watches the ranks ends this process. No key ends before: their streams go on elsewhere.
            self._stopping.wait()
            return []
        except Exception as error:  # whatever it was, its keys end and the next ones are served
            logger.exception("engine step %d failed", self.engine.step_number)
            reason = one_line(error)
            if is_lost(self.engine.pool.device):
                self._on_device_lost(reason)
            return self._fail(f"engine step failed: {type(error).__name__}: {reason}")

    def _fail(self, reason: str) -> list[Output]:
        """End what the failed step computed. Where that fails too, blocks are nobody's any more, or somebody's
        twice."""
        try:
            return self.engine.fail(reason)
        except Exception as error:
            logger.exception("what the failed step held cannot be given back")
            self._on_broken(f"{type(error).__name__}: {error}")
            raise
