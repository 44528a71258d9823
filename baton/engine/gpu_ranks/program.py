"""The program of a rank on a GPU: it reads its part, then launches what it is told."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from baton.engine.core.device import set_threads
from baton.engine.core.model_errors import ModelError
from baton.engine.execute.build import widest
from baton.engine.gpu_ranks.build import device_parts, joined_by, load_part, use
from baton.engine.gpu_ranks.launcher import follow_launches
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.engine.models.registry import read_spec
from baton.engine.parallel.collectives import RankLost
from baton.engine.ranks.process import Assignment
from baton.engine.ranks.program import leave_with_leader, map_memory, ready, say_often

Beside = Callable[[Assignment, Model, KVPool], AbstractContextManager]


def serve(
    memory_for: Callable[[int, torch.device], Any] | None = None,
    beside: Beside = lambda given, model, pool: nullcontext(),
) -> None:
    """Serve until the first rank closes stdin or ends, or a rank is lost. `memory_for(num_bytes, device)` returns the
    pool's memory, by default torch's. `beside`: a context in which steps are launched. Ends with one line if an adapter
    cannot be made ready."""
    given = Assignment.parse(sys.stdin.readline())
    threading.Thread(target=leave_with_leader, daemon=True).start()
    set_threads(given.config.threads)
    try:
        with suppress(RankLost):
            _serve(given, memory_for, beside)
    except ModelError as error:
        raise SystemExit(str(error)) from None


def _serve(given: Assignment, memory_for: Callable[[int, torch.device], Any] | None, beside: Beside) -> None:
    config, device = given.config, torch.device(given.device)
    collectives = joined_by(given, map_memory(given.memory_fd, given.memory_bytes), device)
    say_often(collectives.beat)
    use(device, config)
    loaded = widest(config, read_spec(config.model))
    model = ready(lambda: load_part(loaded, device, collectives, given.stage))
    collectives.join()
    own = memory_for and (lambda num_bytes: memory_for(num_bytes, device))
    _, pool, launcher = device_parts(config, model, collectives, False, memory_for=own)
    with beside(given, model, pool), torch.inference_mode(), launcher.stream_context():
        follow_launches(launcher, collectives)
