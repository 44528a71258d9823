"""A launcher that computes late, and what engines launch."""

import torch

from baton.engine.engine import Engine
from baton.engine.execute.launcher import LaunchedTokens, Launcher


class LateTokens(LaunchedTokens):
    def __init__(self, launcher):
        self._launcher = launcher
        self.drawn = None

    def read(self) -> list[int]:
        self._launcher.compute_until(self)
        return self.drawn.tolist()


class LateLauncher(Launcher):
    """Computes a launch when it is read, or when another step must pass."""

    overlaps, allows_multi_step = True, False

    def __init__(self, model, pool):
        super().__init__(model, pool)
        self.waiting: list = []
        self.num_overlapped = 0

    def launch(self, batch, draw, previous, on_layer=None):
        tokens = LateTokens(self)
        self.num_overlapped += bool(self.waiting)
        assert len(self.waiting) < 2, "more than two steps in flight"
        self.waiting.append((tokens, lambda: Launcher.launch(self, batch, draw, previous, on_layer).drawn))
        return tokens

    def compute_until(self, tokens) -> None:
        while tokens.drawn is None:
            self._compute()

    def _compute(self) -> None:
        tokens, compute = self.waiting.pop(0)
        with torch.inference_mode():
            tokens.drawn = compute()

    def wait(self) -> None:
        while self.waiting:
            self._compute()


def launches_of(engine: Engine) -> list[list[tuple[str, int, int]]]:
    """Return the slices of each launch from here on: request, begin, end."""
    launches, launch = [], engine.runner.launch

    def noted(slices, *given):
        launches.append([(seq.group.key.request_id, begin, end) for seq, begin, end in slices])
        return launch(slices, *given)

    engine.runner.launch = noted
    return launches
