"""Report how far a held prompt's KV is written while the step that completes it still computes."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from baton.engine.core.request import Key, Output, Progress
from baton.engine.schedule.steps import Slice
from kvtransfer.layout import KVLayout

# Each report is a range to digest and confirm, 0.8 ms of CPU on both sides together, as long as copying 1 MiB. So
# layers of a small model are reported several at a time, or with the end of the step.
MIN_INTERVAL_S = 0.002
MIN_BYTES = 1 << 20  # of the longest prompt


def layer_watermark(
    slices: list[Slice], layout: KVLayout, emit: Callable[[list[Output]], None]
) -> "LayerWatermark | None":
    """Return a watermark for the held prompts that end in a step, or None if there are none large enough.

    Without one, all layers may be computed in one call.
    """
    ending = [piece for piece in slices if piece.seq.group.is_for_taker and piece.end == piece.seq.num_tokens]
    num_tokens = max((end - begin for _, begin, end in ending), default=0)
    layer_bytes = num_tokens * layout.block_bytes // (layout.block_size * layout.num_layers)
    if not ending or layer_bytes * layout.num_layers < MIN_BYTES:
        return None
    ends = [(seq.group.key, end) for seq, _, end in ending]
    return LayerWatermark(ends, math.ceil(MIN_BYTES / layer_bytes), emit)


class LayerEvents:
    """CUDA events after each layer's launch: a layer's KV is written when its event has passed."""

    def __init__(self, make: Callable[[], Any] = lambda: torch.cuda.Event()):
        self._make = make
        self._events: list[tuple[int, Any]] = []

    def record(self, layer: int) -> None:
        """Record an event after the launch of a layer."""
        event = self._make()
        event.record()
        self._events.append((layer, event))

    def report(self, on_layer: Callable[[int], None]) -> None:
        """Wait for each layer in order, and call `on_layer` for it."""
        for layer, event in self._events:
            event.synchronize()
            on_layer(layer)


class LayerWatermark:
    """A callback for each layer of a step whose KV is written; reports progress of the held prompts that end in the
    step.

    Earlier chunks of a prompt need none: they are transferred while the next chunk computes.
    """

    def __init__(self, ends: list[tuple[Key, int]], min_layers: int, emit: Callable[[list[Output]], None]):
        """Take key and length of the prompts that end, the fewest layers of a report, and the receiver of reports."""
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
