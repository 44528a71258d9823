"""Convert handles, takers and frames to bytes and back. Input is untrusted: any fault in it raises a KVError.

A frame is an 8-byte header (magic, version, reserved, length) and a KVFrame; raw KV bytes may follow a Ready frame."""

import struct

from google.protobuf.message import DecodeError

from baton.v1 import kv_pb2
from kvtransfer.errors import LayoutMismatch, ProtocolError
from kvtransfer.layout import (
    LAYOUT_VERSION,
    MAX_TOKENS,
    BlockRef,
    Box,
    Endpoint,
    KVGroup,
    KVHandle,
    KVLayout,
    Part,
    PromptKV,
    Range,
    Taker,
)
from kvtransfer.naming import HASH_BYTES, SPAN_TOKENS

_HEADER = struct.Struct("<2sBBI")
_MAGIC = b"KV"
_VERSION = 1
HEADER_BYTES = _HEADER.size
MAX_FRAME_BYTES = 1 << 20
MAX_TAKER_FRAME_BYTES = 16 << 10  # no frame of a taker is longer; a source reads frames of unauthenticated takers too
_MAX_DIMENSION = 1 << 16
_MAX_BLOCK_BYTES = 1 << 32
_MAX_GROUPS = 16
ID_BYTES = 16


def layout_to_proto(layout: KVLayout) -> kv_pb2.KVLayout:
    groups = [
        kv_pb2.KVGroup(
            kind=group.kind, num_layers=group.num_layers, num_kv_heads=group.num_kv_heads, head_dim=group.head_dim,
            form=group.form, block_size=group.block_size,
        )
        for group in layout.groups
    ]  # fmt: skip
    return kv_pb2.KVLayout(version=layout.version, groups=groups)


def layout_from_proto(proto: kv_pb2.KVLayout) -> KVLayout:
    """Return the layout. Raises LayoutMismatch for a version or form that this build does not know, ProtocolError for
    impossible sizes."""
    if proto.version != LAYOUT_VERSION:
        raise LayoutMismatch(f"layout version {proto.version}, this build speaks {LAYOUT_VERSION}")
    if not 1 <= len(proto.groups) <= _MAX_GROUPS:
        raise ProtocolError(f"a layout of {len(proto.groups)} groups: 1 to {_MAX_GROUPS}")
    layout = KVLayout(tuple(_group_from_proto(group) for group in proto.groups))
    if (num_bytes := max(layout.block_bytes, layout.state_bytes)) > _MAX_BLOCK_BYTES:
        raise ProtocolError(f"blocks of {num_bytes} bytes: at most {_MAX_BLOCK_BYTES}")
    return layout


def _group_from_proto(proto: kv_pb2.KVGroup) -> KVGroup:
    sizes = (proto.num_layers, proto.num_kv_heads, proto.head_dim, proto.block_size)
    # A model without attention has a group without layers: its blocks have ids and no bytes.
    if not all(1 <= size <= _MAX_DIMENSION for size in sizes[1:]) or proto.num_layers > _MAX_DIMENSION:
        raise ProtocolError(f"a KV group of {sizes} layers, heads, head_dim, block_size: each 1 to {_MAX_DIMENSION}")
    try:
        return KVGroup(proto.kind, *sizes[:3], proto.form, sizes[3])
    except ValueError as error:
        raise LayoutMismatch(str(error)) from error


def taker_to_proto(taker: Taker) -> kv_pb2.Taker:
    return kv_pb2.Taker(
        instance=taker.instance,
        epoch=taker.epoch,
        layout=layout_to_proto(taker.layout),
        numerics_class=taker.numerics_class,
    )


def taker_from_proto(proto: kv_pb2.Taker) -> Taker:
    """Return the taker. Raises ProtocolError, LayoutMismatch."""
    if not proto.instance:
        raise ProtocolError("a taker without an instance")
    return Taker(proto.instance, proto.epoch, layout_from_proto(proto.layout), proto.numerics_class)


def encode_handle(handle: KVHandle) -> bytes:
    prompt = handle.prompt
    return kv_pb2.KVHandle(
        source_instance=handle.source_instance,
        source_epoch=handle.source_epoch,
        lease_id=handle.lease_id,
        model_identity=handle.model_identity,
        numerics_class=handle.numerics_class,
        layout=layout_to_proto(handle.layout),
        parts=[_part_to_proto(part) for part in handle.parts],
        num_tokens=prompt.num_tokens,
        span_hashes=prompt.span_hashes,
        chain_parent=prompt.chain_parent,
        block_ids=[block.block_id for block in prompt.blocks],
        generations=[block.generation for block in prompt.blocks],
        state_ids=[block.block_id for block in prompt.states],
        state_generations=[block.generation for block in prompt.states],
    ).SerializeToString()


def decode_handle(data: bytes) -> KVHandle:
    """Return the handle. Raises ProtocolError for bytes that are no handle or contradict themselves, LayoutMismatch for
    an unknown form."""
    try:
        proto = kv_pb2.KVHandle.FromString(data)
    except DecodeError as error:
        raise ProtocolError("these bytes are no KV handle") from error
    layout = layout_from_proto(proto.layout)
    _check_counts(proto, layout)
    return KVHandle(
        proto.source_instance,
        proto.source_epoch,
        proto.lease_id,
        proto.model_identity,
        proto.numerics_class,
        layout,
        parts=tuple(_part_from_proto(part, layout) for part in proto.parts),
        prompt=PromptKV(
            proto.num_tokens,
            blocks=tuple(map(BlockRef, proto.block_ids, proto.generations)),
            span_hashes=tuple(proto.span_hashes),
            chain_parent=proto.chain_parent,
            states=tuple(map(BlockRef, proto.state_ids, proto.state_generations)),
        ),
    )


def _check_counts(proto: kv_pb2.KVHandle, layout: KVLayout) -> None:
    if not 1 <= proto.num_tokens <= MAX_TOKENS:
        raise ProtocolError(f"a handle of {proto.num_tokens} tokens: 1 to {MAX_TOKENS}")
    if len(proto.span_hashes) != proto.num_tokens // SPAN_TOKENS:
        raise ProtocolError(f"{len(proto.span_hashes)} span hashes for {proto.num_tokens} tokens")
    num_blocks = layout.num_blocks(proto.num_tokens)
    if not len(proto.block_ids) == len(proto.generations) == num_blocks:
        raise ProtocolError(f"{len(proto.block_ids)} blocks, {len(proto.generations)} generations, {num_blocks} needed")
    if len(set(proto.block_ids)) != num_blocks:
        raise ProtocolError("the handle names a block twice")
    num_states = int(layout.state is not None)
    if not len(proto.state_ids) == len(proto.state_generations) == num_states:
        raise ProtocolError(
            f"{len(proto.state_ids)} states, {len(proto.state_generations)} generations, {num_states} needed"
        )
    if any(len(name) != HASH_BYTES for name in (*proto.span_hashes, proto.chain_parent)):
        raise ProtocolError(f"a span hash that has not {HASH_BYTES} bytes")
    if len(proto.lease_id) != ID_BYTES or not proto.source_instance:
        raise ProtocolError("a handle without lease or source")


def _part_to_proto(part: Part) -> kv_pb2.KVPart:
    endpoints = [kv_pb2.Endpoint(transport=e.transport, address=e.address, host_id=e.host_id) for e in part.endpoints]
    return kv_pb2.KVPart(
        group=part.group, layer_begin=part.layers.start, layer_end=part.layers.stop, head_begin=part.heads.start,
        head_end=part.heads.stop, endpoints=endpoints,
    )  # fmt: skip


def _part_from_proto(proto: kv_pb2.KVPart, layout: KVLayout) -> Part:
    endpoints = tuple(Endpoint(e.transport, e.address, e.host_id) for e in proto.endpoints)
    return Part(*box_from_proto(proto, layout), endpoints)


def box_to_proto(box: Box) -> kv_pb2.KVPart:
    return _part_to_proto(Part(*box, ()))


def box_from_proto(proto: kv_pb2.KVPart, layout: KVLayout) -> Box:
    """Return the box. Raises ProtocolError for layers or heads that the layout does not have."""
    if proto.group >= len(layout.groups):
        raise ProtocolError(f"a part of group {proto.group}, the layout has {len(layout.groups)}")
    group = layout.groups[proto.group]
    layers, heads = range(proto.layer_begin, proto.layer_end), range(proto.head_begin, proto.head_end)
    if not layers or not heads or layers.stop > group.num_layers or heads.stop > group.num_kv_heads:
        raise ProtocolError(f"a part of layers {layers} and heads {heads}, the group has {group}")
    return Box(proto.group, layers, heads)


def range_to_proto(moved: Range) -> kv_pb2.Range:
    return kv_pb2.Range(**moved._asdict())


def range_from_proto(proto: kv_pb2.Range) -> Range:
    return Range(proto.token_begin, proto.token_end, proto.layer_begin, proto.layer_end)


def encode_frame(frame: kv_pb2.KVFrame) -> bytes:
    """Return the frame with its header. Raises ProtocolError for a frame longer than MAX_FRAME_BYTES."""
    body = frame.SerializeToString()
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(body)} bytes: at most {MAX_FRAME_BYTES}")
    return _HEADER.pack(_MAGIC, _VERSION, 0, len(body)) + body


def frame_length(header: bytes, max_bytes: int = MAX_FRAME_BYTES) -> int:
    """Return the length of the frame that follows this header. Raises ProtocolError."""
    if len(header) != HEADER_BYTES:
        raise ProtocolError(f"a frame header of {len(header)} bytes: {HEADER_BYTES}")
    magic, version, _, length = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise ProtocolError("the other side does not speak the KV protocol")
    if version != _VERSION:
        raise ProtocolError(f"the other side speaks version {version} of the KV protocol, this build {_VERSION}")
    if length > max_bytes:
        raise ProtocolError(f"a frame of {length} bytes: at most {max_bytes}")
    return length


def decode_frame(body: bytes) -> kv_pb2.KVFrame:
    """Return the frame. Raises ProtocolError for bytes that are no frame, and for a frame without a known kind."""
    try:
        frame = kv_pb2.KVFrame.FromString(body)
    except DecodeError as error:
        raise ProtocolError("these bytes are no KV frame") from error
    if frame.WhichOneof("kind") is None:
        raise ProtocolError("a frame without a kind that this build knows")
    return frame
