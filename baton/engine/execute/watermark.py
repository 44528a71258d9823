"""Announce how far a held prompt's KV is written while the step that completes it still computes."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from baton.engine.core.request import Key, Output, Progress
from baton.engine.schedule.scheduler import Slice
from kvtransfer.layout import KVLayout

# Each report makes a range of its own to digest and confirm, 0.8 ms of CPU on both sides together, in which 1 MiB and
# more are copied: a small model's layers are reported in groups, or with the end of the step.
MIN_INTERVAL_S = 0.002
MIN_BYTES = 1 << 20  # of the longest prompt


def layer_watermark(
    slices: list[Slice], layout: KVLayout, emit: Callable[[list[Output]], None]
) -> "LayerWatermark | None":
    """None where no held prompt that is worth a report ends in the step: all its layers may then be computed in one
    call."""
    ending = [piece for piece in slices if piece.seq.group.is_for_taker and piece.end == piece.seq.num_tokens]
    num_tokens = max((end - begin for _, begin, end in ending), default=0)
    layer_bytes = num_tokens * layout.block_bytes // (layout.block_size * layout.num_layers)
    if not ending or layer_bytes * layout.num_layers < MIN_BYTES:
        return None
    ends = [(seq.group.key, end) for seq, _, end in ending]
    return LayerWatermark(ends, math.ceil(MIN_BYTES / layer_bytes), emit)


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

    def report(self, on_layer: Callable[[int], None]) -> None:
        """Waits for the layers, one after the other."""
        for layer, event in self._events:
            event.synchronize()
            on_layer(layer)


class LayerWatermark:
    """Called with each layer of a step once its KV is written; reports it for the held prompts that end in the step.

    The earlier chunks of a prompt need none: they leave while the next one computes.
    """

    def __init__(self, ends: list[tuple[Key, int]], min_layers: int, emit: Callable[[list[Output]], None]):
        """`ends`: key and length of the prompts that end; `min_layers`: of one report."""
        self._ends = ends
        self._min_layers = min_layers
        self._emit = emit
        self._reported_at, self._num_unreported = time.monotonic(), 0

    def __call__(self, layer: int) -> None:
        self._num_unreported += 1
        now = time.monotonic()
        if self._num_unreported >= self._min_layers and now - self._reported_at >= MIN_INTERVAL_S:
            self._reported_at, self._num_unreported = now, 0
            self._emit([Progress(key, end, layer + 1) for key, end in self._ends])
