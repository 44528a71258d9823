import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.v1 import kv_pb2
from kvtransfer import wire
from kvtransfer.errors import KVError, LayoutMismatch, ProtocolError, TicketRefused
from kvtransfer.layout import BlockRef, Endpoint, KVHandle, Part, PromptKV, Taker
from kvtransfer.naming import SPAN_TOKENS
from kvtransfer.transfer.ticket import TicketMint, parse_ticket
from tests.support.kvtransfer.rig import layout

UINT32 = st.integers(0, 2**32 - 1)
HANDLE = KVHandle(
    b"p", 2**64 - 1, b"l" * 16, b"m" * 32, "class", layout(),
    (Part(0, range(3), range(2), (Endpoint("tcp", "h:1", "host"),)),),
    PromptKV(70, tuple(BlockRef(index, 2**63 + index) for index in range(5)), (b"h" * 32,), b"h" * 32),
)  # fmt: skip


def test_handle_round_trip():
    assert wire.decode_handle(wire.encode_handle(HANDLE)) == HANDLE


def test_taker_round_trip():
    taker = Taker(b"d", 3, layout(), "class")
    assert wire.taker_from_proto(wire.taker_to_proto(taker)) == taker
    with pytest.raises(ProtocolError):
        wire.taker_from_proto(kv_pb2.Taker(epoch=3, layout=wire.layout_to_proto(layout())))


def test_layout_of_another_version():
    proto = wire.layout_to_proto(layout())
    proto.version = 2
    with pytest.raises(LayoutMismatch, match="version 2"):
        wire.layout_from_proto(proto)


def taken(read, data: bytes):
    """What `read` makes of the bytes; None where it refuses them with a type."""
    try:
        return read(data)
    except KVError:
        return None


def check_handle(handle: KVHandle | None) -> None:
    """What is taken for a handle is one, and says the same when it is sent on."""
    if handle is None:
        return
    assert wire.decode_handle(wire.encode_handle(handle)) == handle
    prompt = handle.prompt
    assert 1 <= prompt.num_tokens <= wire.MAX_TOKENS and len(prompt.span_hashes) == prompt.num_tokens // SPAN_TOKENS
    assert len({block.block_id for block in prompt.blocks}) == handle.layout.num_blocks(prompt.num_tokens)
    for part in handle.parts:
        group = handle.layout.groups[part.group]
        assert 0 <= part.layers.start < part.layers.stop <= group.num_layers
        assert 0 <= part.heads.start < part.heads.stop <= group.num_kv_heads


@given(st.binary(max_size=200))
@example(wire.encode_handle(HANDLE)[:-1])
@example(wire.encode_handle(HANDLE))
@example(wire.encode_frame(kv_pb2.KVFrame(renew=kv_pb2.Renew()))[: wire.HEADER_BYTES])
@example(kv_pb2.KVFrame(renew=kv_pb2.Renew()).SerializeToString())
@example(TicketMint().mint(b"l" * 16, b"d", 3))
def test_random_bytes_are_a_typed_refusal(data):
    check_handle(taken(wire.decode_handle, data))
    assert (frame := taken(wire.decode_frame, data)) is None or frame.WhichOneof("kind")
    assert (length := taken(wire.frame_length, data)) is None or length <= wire.MAX_FRAME_BYTES
    if (ticket := taken(parse_ticket, data)) is not None:
        with pytest.raises(TicketRefused):  # of this mint's it is none
            TicketMint().check(ticket, ticket.taker_instance, ticket.taker_epoch)


@given(st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_damaged_handles_are_a_typed_refusal(position, noise):
    data = bytearray(wire.encode_handle(HANDLE))
    data[position : position + len(noise)] = noise
    check_handle(taken(wire.decode_handle, bytes(data)))


@given(num_tokens=st.integers(0, 200), ids=st.lists(st.integers(0, 20), max_size=13), num_hashes=st.integers(0, 3))
@example(num_tokens=70, ids=[0, 1, 2, 3, 4], num_hashes=1)
@example(num_tokens=70, ids=[0, 1, 2, 3, 3], num_hashes=1)
@example(num_tokens=70, ids=[0, 1, 2, 3], num_hashes=1)
@example(num_tokens=70, ids=[0, 1, 2, 3, 4], num_hashes=2)
@example(num_tokens=0, ids=[], num_hashes=0)
def test_handles_that_contradict_themselves_are_a_typed_refusal(num_tokens, ids, num_hashes):
    proto = kv_pb2.KVHandle.FromString(wire.encode_handle(HANDLE))
    proto.num_tokens = num_tokens
    proto.block_ids[:], proto.generations[:] = ids, [1] * len(ids)
    proto.span_hashes[:] = [b"h" * 32] * num_hashes
    check_handle(taken(wire.decode_handle, proto.SerializeToString()))


@given(st.builds(
    kv_pb2.KVGroup, kind=st.text(max_size=5), num_layers=UINT32, num_kv_heads=UINT32, head_dim=UINT32,
    form=st.sampled_from(("bf16", "int4", "", "x")), block_size=UINT32,
))  # fmt: skip
def test_absurd_layouts_are_a_typed_refusal(group):
    try:
        shape = wire.layout_from_proto(kv_pb2.KVLayout(version=1, groups=[group]))
    except KVError:
        return
    assert 0 < shape.block_bytes <= 1 << 32


def test_frames_are_bounded():
    ready = kv_pb2.Ready(digests=range(200_000))
    with pytest.raises(ProtocolError, match="at most"):
        wire.encode_frame(kv_pb2.KVFrame(ready=ready))
