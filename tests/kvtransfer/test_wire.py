import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.v1 import kv_pb2
from kvtransfer import wire
from kvtransfer.errors import KVError, LayoutMismatch, ProtocolError
from kvtransfer.layout import BlockRef, Endpoint, KVHandle, Part
from kvtransfer.transfer.ticket import parse_ticket
from tests.support.kvtransfer.rig import layout

UINT32 = st.integers(0, 2**32 - 1)
HANDLE = KVHandle(
    b"p", 2**64 - 1, b"l" * 16, b"m" * 32, "class", layout(),
    (Part(0, range(3), range(2), (Endpoint("tcp", "h:1", "host"),)),), 70, (b"h" * 32,), b"h" * 32,
    tuple(BlockRef(index, 2**63 + index) for index in range(5)),
)  # fmt: skip


def test_handle_round_trip():
    assert wire.decode_handle(wire.encode_handle(HANDLE)) == HANDLE


def test_taker_round_trip():
    taker = wire.Taker(b"d", 3, layout(), "class", 128, ("shm", "tcp"), "host")
    assert wire.taker_from_proto(wire.taker_to_proto(taker)) == taker
    with pytest.raises(ProtocolError):
        wire.taker_from_proto(kv_pb2.Taker(instance=b"d", num_cached_tokens=7))


def test_layout_of_another_version():
    proto = wire.layout_to_proto(layout())
    proto.version = 2
    with pytest.raises(LayoutMismatch, match="version 2"):
        wire.layout_from_proto(proto)


@given(st.binary(max_size=200))
@example(wire.encode_handle(HANDLE)[:-1])
def test_random_bytes_are_a_typed_refusal(data):
    for read in (wire.decode_handle, wire.decode_frame, wire.frame_length, parse_ticket):
        try:
            read(data)
        except KVError:
            pass


@given(st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_damaged_handles_are_a_typed_refusal(position, noise):
    data = bytearray(wire.encode_handle(HANDLE))
    data[position : position + len(noise)] = noise
    try:
        wire.decode_handle(bytes(data))
    except KVError:
        pass


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
