"""The common program of all ranks, whatever they compute on: say once that the part is ready or why not, say often that
the process runs, and exit with the first rank."""

import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable

from baton import failpoints
from baton.engine.core.model_errors import ModelError
from baton.engine.models.decoder import Model
from baton.engine.parallel.collectives import RankLost
from baton.engine.ranks.process import Ready
from baton.engine.ranks.spawn import BEAT_S


def ready(load: Callable[[], Model]) -> Model:
    """Load this rank's part and say that it is ready; on an error say why, and exit."""
    failpoints.hit("rank.load")
    try:
        model = load()
    except (ModelError, ValueError) as error:
        _say(json.dumps({"error": str(error)}))
        sys.exit(1)
    failpoints.hit("rank.ready")
    _say(Ready.of(model).line())
    return model


def map_memory(fd: int, num_bytes: int) -> memoryview:
    """Return the memory behind an inherited descriptor."""
    return memoryview(mmap.mmap(fd, num_bytes))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def say_often(beat: Callable[[], None]) -> None:
    """Say often that this process runs."""

    def repeat() -> None:
        while True:
            try:
                beat()
            except RankLost:
                return
            time.sleep(BEAT_S / 2)

    threading.Thread(target=repeat, daemon=True).start()


def leave_with_leader() -> None:
    """Exit when stdin is closed, explicitly or by the end of the first rank."""
    while os.read(0, 1024):  # not by sys.stdin, which main has locked
        pass
    os._exit(0)
