"""Invalid bytes and messages, into all readers of untrusted input: a typed refusal, or a valid result.

H8 and parts of H1, H2, H4: the door's requests, a worker's commands, KV handles, takers, tickets and frames, values of
Redis, headers of .gguf files.
"""

import atexit
import json
import os
import random
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from google.protobuf.message import DecodeError, Message

from baton.engine.core.request import Key
from baton.gguf import TEXT, GGUFError, GGUFHeader
from baton.service.errors import BatonError
from baton.v1 import kv_pb2
from baton.v1 import worker_pb2 as pb
from baton.worker.wire import messages
from gateway.config.served_model import ServedModel
from gateway.discovery.redis_directory import _read as read_member
from gateway.model.model_folder import Defaults
from gateway.prefix.prefix_matches import Matches
from gateway.prefix.worker_bitmap import bit_sets, worker_bits_of
from gateway.queue.quota_sync import read_counts
from gateway.request.validation import validate
from kvtransfer.errors import KVError
from kvtransfer.transfer.ticket import parse_ticket
from kvtransfer.wire import decode_frame, decode_handle, frame_length, layout_from_proto, taker_from_proto
from tests.support.client import make_request

_MODEL = ServedModel("fake", 1024, 400, frozenset([0, 4]), Defaults())
_NUMBERS = (0, 1, 2, 7, 8, 63, 64, 255, 400, 1023, 1024, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-30, 3e38, float("inf"), float("-inf"), float("nan"))
_MAX_S = 1.0  # of processor time for one input: a loop, if it takes longer


def run(count: int, seed: int) -> dict:
    """Counts of inputs and of crashes: exceptions that are not one of ours, or an input that takes seconds."""
    draw, num_crashes, slowest = random.Random(seed), 0, 0.0
    for number in range(count):
        target = draw.choice(_TARGETS)
        began = time.thread_time()
        try:
            target(draw)
        except (BatonError, KVError, DecodeError, GGUFError):
            pass
        except Exception as error:
            num_crashes += 1
            print(f"input {number} of seed {seed}, {target.__name__}: {type(error).__name__}: {error}", flush=True)
        took = time.thread_time() - began
        slowest = max(slowest, took)
        num_crashes += took > _MAX_S
    return {"fuzz_inputs": count, "fuzz_crashes": num_crashes, "slowest_ms": round(1e3 * slowest, 1)}


def a_request(draw: random.Random) -> None:
    validate(
        _damaged(draw, make_request([5, 6, 7], max_tokens=4, n=2, seed=9, stop=["x"], logit_bias={5: 1.0})), _MODEL
    )


def a_spec(draw: random.Random) -> None:
    spec = pb.RequestSpec(token_ids=[5, 6, 7], num_prompt_tokens=3, span_hashes=[b"h" * 32], chain_parent=b"p" * 32,
                          max_tokens=4, budget_ms=1000)  # fmt: skip
    spec.sampling.MergeFrom(pb.WorkerSampling(top_p=1.0, repetition_penalty=1.0, n=1))
    try:
        messages.request_of(Key("fuzz"), _damaged(draw, spec), 400)
    except ValueError:  # how a worker says BAD_COMMAND
        pass


def a_command(draw: random.Random) -> None:
    _damaged(
        draw, pb.Command(admit=pb.Admit(key=pb.Key(request_id="x", attempt=3), spec=pb.RequestSpec(token_ids=[1])))
    )


def a_handle(draw: random.Random) -> None:
    decode_handle(_damaged(draw, _HANDLE).SerializeToString())


def a_taker(draw: random.Random) -> None:
    taker_from_proto(
        _damaged(draw, kv_pb2.Taker(instance=b"i" * 16, epoch=5, layout=_HANDLE.layout, num_cached_tokens=64))
    )


def a_layout(draw: random.Random) -> None:
    layout_from_proto(_damaged(draw, _HANDLE.layout))


def a_frame(draw: random.Random) -> None:
    frame_length(draw.randbytes(draw.choice((0, 4, 8, 12))))
    decode_frame(_noise(draw))


def a_value_of_redis(draw: random.Random) -> None:
    values = [draw.choice((None, _noise(draw), draw.randrange(9), "text", [b"x"])) for _ in range(draw.randrange(8))]
    dict(Matches(bit_sets(values), worker_bits_of([b"w" * 24, 7, None, b"v"])))


def a_ticket(draw: random.Random) -> None:
    ticket = kv_pb2.Ticket(lease_id=b"l" * 16, taker_instance=b"i" * 16, taker_epoch=5)
    parse_ticket(_damaged_bytes(draw, ticket.SerializeToString()))


def what_a_gateway_told(draw: random.Random) -> None:
    told = json.dumps({"tenant": [draw.choice(_NUMBERS), draw.choice(_FLOATS)], "other": [0, 0]}).encode()
    read_counts(draw.choice((None, 7, _noise(draw), told, _damaged_bytes(draw, told))))


def a_member_of_the_roster(draw: random.Random) -> None:
    read_member(draw.choice((None, 7, _noise(draw), _damaged_bytes(draw, b"prefill 127.0.0.1:50051"))))


def a_gguf_header(draw: random.Random) -> None:
    _GGUF_FILE.write_bytes(_damaged_bytes(draw, _GGUF))
    header = GGUFHeader(_GGUF_FILE)
    header.get("general.architecture", TEXT)
    assert len(header.tokenizer_digest) == 32


_TARGETS: tuple[Callable[[random.Random], None], ...] = (
    a_request, a_spec, a_command, a_handle, a_taker, a_layout, a_frame, a_value_of_redis,
    a_ticket, what_a_gateway_told, a_member_of_the_roster, a_gguf_header,
)  # fmt: skip


def _noise(draw: random.Random) -> bytes:
    return draw.randbytes(draw.choice((0, 1, 2, 7, 30, 200)))


def _damaged(draw: random.Random, message: Message) -> Message:
    """The message with fields at their borders, or with its bytes cut, changed, repeated or replaced."""
    damaged = type(message)()
    damaged.CopyFrom(message)
    if draw.random() < 0.6:
        for _ in range(draw.randrange(1, 4)):
            _set_somewhere(draw, damaged)
        return damaged
    return type(message).FromString(_damaged_bytes(draw, message.SerializeToString()))


def _damaged_bytes(draw: random.Random, well: bytes) -> bytes:
    """Cut, changed, repeated or replaced."""
    data = bytearray(well)
    kind = draw.randrange(4)
    if kind == 0:
        data = data[: draw.randrange(len(data) + 1)]
    elif kind == 1 and data:
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif kind == 2:
        data *= draw.randrange(2, 20)
    else:
        data = bytearray(_noise(draw))
    return bytes(data)


def _set_somewhere(draw: random.Random, message: Message) -> None:
    if not message.DESCRIPTOR.fields:
        return
    field = draw.choice(message.DESCRIPTOR.fields)
    if field.message_type and field.message_type.GetOptions().map_entry:
        return
    value = getattr(message, field.name)
    repeated = not isinstance(value, (int, float, bool, str, bytes, Message))
    if field.message_type:
        _set_somewhere(draw, value.add() if repeated else value)
        return
    drawn = _value(draw, field)
    if repeated:
        value.extend([drawn] * draw.choice((1, 2, 70)))
    else:
        setattr(message, field.name, drawn)


def _value(draw: random.Random, field):
    kinds = type(field)
    if field.cpp_type in (kinds.CPPTYPE_FLOAT, kinds.CPPTYPE_DOUBLE):
        return draw.choice(_FLOATS)
    if field.cpp_type == kinds.CPPTYPE_STRING:
        return (
            _noise(draw)
            if field.type == kinds.TYPE_BYTES
            else draw.choice(("", "x", "é" * 200, "\x00", "../..", "a" * 65))
        )
    if field.cpp_type == kinds.CPPTYPE_BOOL:
        return bool(draw.randrange(2))
    bits = 64 if field.cpp_type in (kinds.CPPTYPE_INT64, kinds.CPPTYPE_UINT64) else 32
    number = draw.choice(_NUMBERS) % (1 << bits)
    signed = field.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_INT64, kinds.CPPTYPE_ENUM)
    return struct.unpack("<q" if bits == 64 else "<i", number.to_bytes(bits // 8, "little"))[0] if signed else number


def _handle() -> kv_pb2.KVHandle:
    layout = kv_pb2.KVLayout(version=1)
    layout.groups.add(kind="paged", num_layers=2, num_kv_heads=2, head_dim=16, form="bf16", block_size=32)
    return kv_pb2.KVHandle(source_instance=b"i" * 16, source_epoch=3, lease_id=b"l" * 16, layout=layout, num_tokens=70,
                           span_hashes=[b"s" * 32], chain_parent=b"s" * 32, block_ids=[1, 2, 3],
                            generations=[1, 1, 1])  # fmt: skip


def _gguf() -> bytes:
    """A header with a text, numbers, an array and a tensor."""

    def text(words: str) -> bytes:
        return struct.pack("<Q", len(words)) + words.encode()

    values = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("general.alignment") + struct.pack("<II", 4, 32),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"),
        text("tokenizer.ggml.scores") + struct.pack("<IIQff", 9, 6, 2, 0.0, 1.0),
    ]
    tensor = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 4, 2, 0, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, 1, len(values)) + b"".join(values) + tensor + bytes(64)


_HANDLE, _GGUF = _handle(), _gguf()
_GGUF_FILE = Path(tempfile.gettempdir()) / f"baton-fuzz-{os.getpid()}.gguf"
atexit.register(_GGUF_FILE.unlink, missing_ok=True)
