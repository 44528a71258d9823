"""The greedy guesses of a draft in one native call for all of its passes, and those of heads (native/layers/draft.cpp).

A pass of a small model takes less time than the Python and torch calls around it: of the demo's EAGLE-style layer they
were four fifths. Sampled guesses need the noise of each position and go pass by pass, see draft_sampling.py.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine import native
from baton.engine.kv.native import NativePool
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.models.decoder import Model
from baton.engine.models.fused import FusedLayers
from baton.engine.models.native_ends import has_native_ends, head_address, norm_address, table_address

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class _Draft(ctypes.Structure):
    """Mirror `Draft` of native/layers/draft.cpp."""

    _fields_ = [
        ("model", _POINTER),
        ("num_layers", _INT),
        *((name, _POINTER) for name in ("norm", "head", "table")),
        *((name, _POINTER) for name in ("project", "embedding_norm", "features_norm", "target_norm")),
    ]


class EntryLayer(NamedTuple):
    """Hold the parts before a layer that continues from its target's hidden rows."""

    project: PackedLinear
    embedding_norm: Tensor
    features_norm: Tensor
    target_norm: Tensor


class UnreadTokens(NamedTuple):
    """Describe the unread tokens of one sequence, `Unread` of native/layers/draft.cpp. Its blocks hold K and V in the
    order of its rows."""

    num_tokens: int  # at least one
    num_rows: int  # rows once the tokens are read
    position: int  # of the first token, for the rotation
    num_wanted: int  # guesses wanted, at least one
    block_ids: int  # address of int64, enough blocks for num_rows and the most guesses


class Passes:
    """Apply layers, a norm and an output head to their own guesses in turn."""

    def __init__(
        self, model: Model, layers: FusedLayers, norm: Tensor, pool: NativePool, entry: EntryLayer | None = None
    ):
        """Run `layers`, the model's own or with an `entry` those of its draft, between the embedding and head of
        `model`."""
        self._held = (model, layers, norm, entry)  # the struct points at these
        self._pool, self._layers = pool, layers
        parts = [None] * 4 if entry is None else [entry.project.address, *(part.data_ptr() for part in entry[1:])]
        self._draft = _Draft(
            layers.address, layers.num_layers, norm.data_ptr(), model.head.address,
            table_address(model), *parts,
        )  # fmt: skip
        arguments = (_POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT, _POINTER, _INT)
        self._run = native.library().function("baton_draft", *arguments)

    @staticmethod
    def fit(model: Model, layers: object) -> bool:
        """Return whether all parts of a pass are native."""
        return isinstance(layers, FusedLayers) and model.spec.embedding_scale == 1 and has_native_ends(model)

    def __call__(
        self, unread: Sequence[UnreadTokens], token_ids: list[int], hidden: Tensor | None = None
    ) -> list[list[int]]:
        """Return guesses for each sequence, and write KV of all but the last guess. `token_ids`: the unread tokens of
        all sequences, one after the other; with an entry, `hidden` holds the target's rows [len(token_ids),
        hidden_size] for them. Every sequence needs room for as many guesses as the one that wants the most."""
        width = max(each.num_wanted for each in unread)
        ids, drafted = array("q", token_ids), array("q", bytes(8 * width * len(unread)))
        table = array("q", [number for each in unread for number in each])
        self._run(
            ctypes.addressof(self._draft), ctypes.addressof(self._pool), table.buffer_info()[0], len(unread),
            ids.buffer_info()[0], None if hidden is None else hidden.data_ptr(), width, drafted.buffer_info()[0],
            torch.get_num_threads(),
        )  # fmt: skip
        return [list(drafted[i * width : i * width + each.num_wanted]) for i, each in enumerate(unread)]


class _Head(ctypes.Structure):
    """Mirror `Head` of native/layers/draft.cpp."""

    _fields_ = [(name, _POINTER) for name in ("enter", "leave", "scale")]


class _Heads(ctypes.Structure):
    """Mirror `Heads` of native/layers/draft.cpp."""

    _fields_ = [(name, _POINTER) for name in ("model", "output", "table", "target_norm", "ones", "heads")]


class NativeHeads:
    """Apply Medusa-style heads of a model to the rows of all sequences."""

    def __init__(self, model: Model, enter: Sequence[PackedLinear], leave: Sequence[PackedLinear], scales: Tensor):
        """Pack `enter` [2 * hidden_size, 2 * hidden_size] and `leave` [hidden_size, hidden_size] of each head, with
        `scales` [heads, hidden_size] in the model's dtype."""
        ones = torch.ones_like(scales[0])
        heads = (_Head * len(enter))(
            *(
                (first.address, last.address, scale.data_ptr())
                for first, last, scale in zip(enter, leave, scales, strict=True)
            )
        )
        self._held = (model, enter, leave, scales, ones, heads)  # the struct points at these
        self._heads = _Heads(
            model.fused.address, head_address(model), table_address(model), norm_address(model), ones.data_ptr(),
            ctypes.addressof(heads),
        )  # fmt: skip
        arguments = (_POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER, _INT)
        self._run = native.library().function("baton_heads", *arguments)

    def __call__(self, hidden: Tensor, token_ids: list[int], num_heads: int) -> list[list[int]]:
        """Return the guesses of the first `num_heads` heads for each sequence; `hidden` [S, hidden_size]: the target's
        rows that `token_ids` were drawn from."""
        ids, drafted = array("q", token_ids), array("q", bytes(8 * num_heads * len(token_ids)))
        self._run(
            ctypes.addressof(self._heads), hidden.data_ptr(), ids.buffer_info()[0], len(token_ids), num_heads,
            drafted.buffer_info()[0], torch.get_num_threads(),
        )  # fmt: skip
        return [list(drafted[i : i + num_heads]) for i in range(0, len(drafted), num_heads)]
