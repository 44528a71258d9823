"""Describe the layout of KV in a worker's pool, and what one worker tells another about it. Plain Python, no protobuf.

Pool memory is `[block][layer][k|v][kv_head][token][head_dim]`, one group after the other within a block; the scales of
a quantized form stand at the end of the same block. A latent group has one row in place of K and V, which are both
computed from it.

A state group is not part of these blocks: its layers keep a state per sequence, whose size does not grow with the
sequence. Blocks of states, [layer][elements] in fp32, stand at the end of the same memory, the first one last, so that
the size of the memory tells where they are."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvtransfer.naming import HASH_BYTES, SPAN_TOKENS

LAYOUT_VERSION = 1
MAX_TOKENS = 1 << 24  # of a prompt
STATE = "state"  # kind of a group that has one block per sequence
_ALIGNMENT = 64  # bytes, of the first state block


class KVForm(NamedTuple):
    """Describe how a row of KV (one token of one head) is stored; baton/engine/kv/stored_forms.py encodes and decodes
    it."""

    element: str  # torch's name of the dtype that elements are stored in
    bits: int  # per element
    lossiness: int  # KV may be converted to a form of higher lossiness only
    scale_bytes: int = 0  # per row: an fp16 scale, and for int4 an fp16 zero point


# All forms are declared here. Kernels know a form by its position in this table, as native/kv.h numbers them.
KV_FORMS = {
    "fp32": KVForm("float32", 32, 0),
    "bf16": KVForm("bfloat16", 16, 1),
    "fp16": KVForm("float16", 16, 1),
    "fp8_e4m3": KVForm("float8_e4m3fn", 8, 2),
    "fp8_e5m2": KVForm("float8_e5m2", 8, 2),
    "int8": KVForm("int8", 8, 2, scale_bytes=2),
    "int4": KVForm("uint8", 4, 3, scale_bytes=4),  # two elements a byte
}


class BlockRef(NamedTuple):
    """Name a block of a pool, and its generation when it was handed out. Reuse of the block increments the
    generation."""

    block_id: int
    generation: int


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Describe the layers of a model that keep KV of one shape and form."""

    kind: str  # paged | latent | state
    num_layers: int
    num_kv_heads: int
    head_dim: int
    form: str  # stored form, a key of KV_FORMS
    block_size: int  # tokens; divides 64 or is a multiple of it

    def __post_init__(self):
        if self.form not in KV_FORMS:
            raise ValueError(f"kv form {self.form!r}: one of {', '.join(KV_FORMS)}")
        if self.block_size < 1 or (SPAN_TOKENS % self.block_size and self.block_size % SPAN_TOKENS):
            raise ValueError(f"block size {self.block_size}: must divide {SPAN_TOKENS} or be a multiple of it")

    @property
    def num_kinds(self) -> int:
        """Return the number of rows per token and head: 2 for K and V, 1 for a latent or a state."""
        return 1 if self.kind in ("latent", STATE) else 2

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row, without its scale."""
        return self.head_dim * KV_FORMS[self.form].bits // 8

    @property
    def row_scale_bytes(self) -> int:
        """Return the bytes of the scale of one row, 0 for a form without scales."""
        return KV_FORMS[self.form].scale_bytes

    @property
    def cell_bytes(self) -> int:
        """Return the bytes of one (layer, k|v, kv head) of one block: block_size contiguous rows, without scales."""
        return self.block_size * self.row_bytes

    @property
    def head_bytes(self) -> int:
        return self.num_layers * self.num_kinds * self.num_kv_heads * self.cell_bytes

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of all scales of one block. They follow its rows, in the order
        [layer][k|v][kv_head][token]."""
        return self.num_layers * self.num_kinds * self.num_kv_heads * self.block_size * self.row_scale_bytes

    @property
    def block_bytes(self) -> int:
        return self.head_bytes + self.scale_bytes


class Box(NamedTuple):
    """Name layers and kv heads of a group, numbered as in the whole model. A tuple of boxes, in the order of the
    groups, is the shard that one rank holds."""

    group: int
    layers: range
    heads: range


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Describe the KV of a whole model, or of the pool that holds one rank's shard of it."""

    groups: tuple[KVGroup, ...]
    version: int = LAYOUT_VERSION

    @property
    def block_bytes(self) -> int:
        return sum(group.block_bytes for group in self.groups if group.kind != STATE)

    @property
    def state(self) -> KVGroup | None:
        """Return the state group, which is the last group of a layout, or None."""
        return self.groups[-1] if self.groups[-1].kind == STATE else None

    @property
    def state_bytes(self) -> int:
        """Return the bytes of one block of states (all layers of one sequence)."""
        return 0 if self.state is None else self.state.block_bytes

    def pool_bytes(self, num_blocks: int, num_states: int = 0) -> int:
        """Return the bytes of a pool of `num_blocks` blocks of tokens and `num_states` blocks of states."""
        num_bytes = num_blocks * self.block_bytes
        if num_states:
            num_bytes += -num_bytes % _ALIGNMENT
        return num_bytes + num_states * self.state_bytes

    @property
    def block_size(self) -> int:
        return self.groups[0].block_size

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.groups)

    def first_layer(self, group: int) -> int:
        """Return the number of the group's first layer, counted over all groups."""
        return sum(each.num_layers for each in self.groups[:group])

    @property
    def whole(self) -> tuple[Box, ...]:
        """Return the shard that is the whole model."""
        return tuple(Box(i, range(g.num_layers), range(g.num_kv_heads)) for i, g in enumerate(self.groups))

    def cut(self, shard: Sequence[Box]) -> "KVLayout":
        """Return the layout of the pool that holds `shard` of this model. Raises ValueError for a box that is not in
        the model."""
        groups: list[KVGroup] = []
        for box in shard:
            group = self.groups[box.group] if box.group < len(self.groups) else None
            is_empty = group is not None and group.num_layers == 0  # blocks of a model without attention are names
            if not group or not (box.layers or is_empty) or not box.heads or min(box.layers.start, box.heads.start) < 0:
                raise ValueError(f"{box} of {self}")
            if box.layers.stop > group.num_layers or box.heads.stop > group.num_kv_heads:
                raise ValueError(f"{box} goes beyond {group}")
            groups.append(replace(group, num_layers=len(box.layers), num_kv_heads=len(box.heads)))
        return KVLayout(tuple(groups), self.version)

    @property
    def fingerprint(self) -> bytes:
        return hashlib.sha256(repr(self).encode()).digest()[:16]

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Say where a source listens by one transport; `host_id` tells whether two processes share a host."""

    transport: str
    address: str
    host_id: str


@dataclass(frozen=True, slots=True)
class Part:
    """Describe the layers and heads of a group that one rank of a source holds, and where that rank listens."""

    group: int
    layers: range
    heads: range
    endpoints: tuple[Endpoint, ...]

    @property
    def box(self) -> Box:
        return Box(self.group, self.layers, self.heads)


class Range(NamedTuple):
    """Name whole tokens of whole layers."""

    token_begin: int
    token_end: int
    layer_begin: int
    layer_end: int

    @property
    def num_tokens(self) -> int:
        return self.token_end - self.token_begin


@dataclass(frozen=True, slots=True)
class Taker:
    """Describe a taker to the source that makes it an offer."""

    instance: bytes
    epoch: int
    layout: KVLayout
    numerics_class: str


@dataclass(frozen=True, slots=True)
class PromptKV:
    """Name one prompt's KV in the pool of a source. Raises ValueError for counts that contradict each other."""

    num_tokens: int  # those after the last full span are the tail
    blocks: tuple[BlockRef, ...]  # of tokens, in order
    span_hashes: tuple[bytes, ...]  # one per full span
    chain_parent: bytes  # parent of the tail's span
    states: tuple[BlockRef, ...] = ()  # one for a layout with a state: the state after the last token

    def __post_init__(self):
        if not 1 <= self.num_tokens <= MAX_TOKENS:
            raise ValueError(f"{self.num_tokens} tokens: 1 to {MAX_TOKENS}")
        if len(self.span_hashes) != self.num_tokens // SPAN_TOKENS or len(self.chain_parent) != HASH_BYTES:
            raise ValueError(f"{len(self.span_hashes)} span hashes for {self.num_tokens} tokens")


@dataclass(frozen=True, slots=True)
class KVHandle:
    """Carry everything a taker needs to pull one prompt's KV (the baton). The gateway passes it on as opaque bytes."""

    source_instance: bytes
    source_epoch: int
    lease_id: bytes
    model_identity: bytes
    numerics_class: str
    layout: KVLayout
    parts: tuple[Part, ...]
    prompt: PromptKV


@dataclass(frozen=True, slots=True)
class NumericsClass:
    """Name how KV is computed: two workers' KV is interchangeable bit for bit exactly when their classes are equal."""

    identity: str  # ModelIdentity, hex
    weights: str  # weight form
    compute: str  # compute dtype
    kv_form: str
    tp: int = 1
    batch_invariant: bool = True
    extra: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        mode = "exact" if self.batch_invariant else "fast"
        fields = (self.identity[:16], self.weights, self.compute, self.kv_form, f"tp{self.tp}", mode)
        return "/".join((*fields, *self.extra))

    @classmethod
    def parse(cls, text: str) -> "NumericsClass":
        """Return the class that `text`, made by `str`, names. Raises ValueError for any other text."""
        identity, weights, compute, kv_form, tp, mode, *extra = text.split("/")
        return cls(identity, weights, compute, kv_form, int(tp.removeprefix("tp")), mode == "exact", tuple(extra))
