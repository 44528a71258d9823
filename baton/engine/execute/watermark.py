"""Announce how far a held prompt's KV is written while the step that completes it still computes."""

import time
from collections.abc import Callable
from typing import Any

import torch

from baton.engine.core.request import Key, Output, Progress
from baton.engine.schedule.scheduler import Slice

# Each report makes a range of its own to digest and confirm: a small model's layers (0.5 ms) are reported in groups.
MIN_INTERVAL_S = 0.002


def layer_watermark(slices: list[Slice], emit: Callable[[list[Output]], None]) -> "LayerWatermark | None":
    """None where no held prompt ends in the step: all its layers may then be computed in one call."""
    ends = [(seq.group.key, end) for seq, _, end in slices if seq.group.is_held and end == seq.num_tokens]
    return LayerWatermark(ends, emit) if ends else None


class LayerEvents:
    """On a GPU that a layer was launched does not mean that its KV is written: an event behind each layer does."""

    def __init__(self, make: Callable[[], Any] = lambda: torch.cuda.Event()):
        self._make = make
        self._events: list[tuple[int, Any]] = []

    def record(self, layer: int) -> None:
        """The write of this layer's KV is launched."""
        event = self._make()
        event.record()
        self._events.append((layer, event))

    def tell(self, on_layer: Callable[[int], None]) -> None:
        """Waits for the layers, one after the other."""
        for layer, event in self._events:
            event.synchronize()
            on_layer(layer)


class LayerWatermark:
    """Called with each layer of a step once its KV is written; reports it for the held prompts that end in the step.

    The earlier chunks of a prompt need none: they leave while the next one computes.
    """

    def __init__(self, ends: list[tuple[Key, int]], emit: Callable[[list[Output]], None]):
        """`ends`: key and length of the prompts that end."""
        self._ends = ends
        self._emit = emit
        self._reported_at = time.monotonic()

    def __call__(self, layer: int) -> None:
        now = time.monotonic()
        if now - self._reported_at >= MIN_INTERVAL_S:
            self._reported_at = now
            self._emit([Progress(key, end, layer + 1) for key, end in self._ends])
