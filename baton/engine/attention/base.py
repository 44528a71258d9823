"""The contract of an attention backend: it reads KV out of the pool for the queries of one step.

Exact backends reduce over KV in fixed spans of absolute positions and read what was stored, the step's own chunk
included; a query row is computed in one order, whatever rows and sequences share the step.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.engine.core.batch import ForwardBatch
from baton.engine.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Describe the heads of a model as attention sees them, and their device. `windows`: for each layer, the number of
    positions that a token sees, itself included; `chunked`: it sees those from the last multiple of the window on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")
    kv_form: str = ""  # as stored; "": unknown
    block_size: int = 0  # tokens; 0: unknown
    given_scale: float | None = None  # factor on scores; None: 1 / sqrt(head_dim)
    softcap: float | None = None  # scores become softcap * tanh(score / softcap); None: they are unchanged
    sinks: bool = False  # each head adds a score without a value to every softmax, see Attention.set_sinks
    chunked: bool = False

    @property
    def group_size(self) -> int:
        """Return how many query heads share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """Return the factor on scores."""
        return self.head_dim**-0.5 if self.given_scale is None else self.given_scale


class Attention(ABC):
    """Attend over paged KV; made once per model."""

    name: str
    batch_invariant: bool
    # Whether it reads only the batch's table (tensors, and the bounds max_query_len and max_kv_len) and shapes, copies
    # nothing from the host and never waits for the device, so that decode steps may be captured in CUDA graphs.
    capturable: bool = False
    # Whether it reads no span before a layer's window, so that such KV may have been released.
    skips_outside: bool = False

    def __init__(self, shape: AttentionShape):
        self.shape = shape
        self.sinks = torch.empty(0)  # fp32 [layers, heads], of a shape with sinks

    def set_sinks(self, sinks: Tensor) -> None:
        """Set the sinks of all layers, fp32 [layers, heads], before the first step of a shape with sinks."""
        self.sinks = sinks.contiguous()

    @classmethod
    def unfit(cls, shape: AttentionShape) -> str:
        """Return why the backend cannot serve this model on this machine; "" if it can."""
        return ""

    @classmethod
    def avoid(cls, shape: AttentionShape) -> str:
        """Return why the backend is used only if it is asked for by name; "" if `auto` may choose it."""
        return ""

    @abstractmethod
    def plan(self, batch: ForwardBatch, pool: KVPool) -> Any:
        """Return the data that all layers of this step share: block tables, masks."""

    @abstractmethod
    def __call__(self, plan: Any, layer: int, q: Tensor, out: Tensor) -> None:
        """Attend with q [T, num_heads, head_dim] (rotated) into out [T, num_heads, head_dim].

        The step's own K and V are already in the pool.
        """


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None, chunked: bool = False) -> Tensor:
    """Return which keys a query sees, bool [queries, keys]: itself and earlier ones, at most `window` in all, or with
    `chunked` those from the last multiple of the window on."""
    queries = query_positions.unsqueeze(1)
    seen = queries >= key_positions
    if window is None:
        return seen
    return seen & (key_positions >= queries // window * window if chunked else queries - key_positions < window)


def unfit_cuda(device: torch.device, least: tuple[int, int], below: tuple[int, int] | None = None) -> str:
    """Return why `device` is not a CUDA device of compute capability `least` to below `below`; "" if it is."""
    if device.type != "cuda":
        return "needs a CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < least or (below and capability >= below):
        text = "the device has compute capability {}.{}, needs {}.{}".format(*capability, *least)
        return text + (" to below {}.{}".format(*below) if below else "")
    return ""
