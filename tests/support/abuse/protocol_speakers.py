"""Bytes of an attacker in the protocol of a port: open a connection, make a call, cancel it, or only cost time.

Each speaker also hears: it counts what the other side answers, by status.
"""

import gzip
import itertools
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import grpc
from hpack import Decoder, Encoder, HPACKError, NeverIndexedHeaderTuple

from baton.v1 import kv_pb2
from kvtransfer.wire import HEADER_BYTES, MAX_TAKER_FRAME_BYTES
from tests.support.abuse.catalogue import FRAMES, GRPC, HTTP, HTTPS, Abuse, Method

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_CANCEL = struct.pack(">I", 8)
_WIDE = (1 << 31) - 1
_MAX_FRAME = 16_384
_STATUSES = {str(code.value[0]): code.name for code in grpc.StatusCode}
_BOMB = gzip.compress(bytes(8 << 20))
_TIMEOUTS = ("0n", "1n", "-1S", "99999999H", "soon", "0S", "1m", "99999999999H")
NOISE = random.Random(7).randbytes(4096)
CLIENT_HELLO_HALF = bytes.fromhex("16030100f8010000f40303") + NOISE[:60]  # of a TLS record that says it has 248 bytes
_HUGE, _LARGE = 1 << 30, 1 << 20


class Call(NamedTuple):
    """The parts of one call: its head, the messages within the window, and what drips afterwards."""

    head: bytes = b""
    body: tuple[bytes, ...] = ()  # frames
    drips: Iterator[bytes] = iter(())


class Speaker:
    """One connection. `outcomes`: answers by method and status; `window`: how many bytes of messages the other side
    still takes."""

    window = 1 << 40
    has_windows = False  # otherwise who does not read says so by a window of 0

    def __init__(self, abuse: Abuse, methods: Sequence[Method], metadata: Sequence[tuple[str, str]], say: Callable):
        """`say` writes to the connection."""
        self.outcomes: Counter[str] = Counter()
        self.on_window: Callable[[], None] = lambda: None
        self._abuse, self._methods, self._metadata, self._say = abuse, methods, metadata, say
        self._heard = bytearray()

    def opening(self) -> bytes:
        return b""

    def half_opening(self) -> bytes:
        raise NotImplementedError

    def flood(self, number: int) -> bytes:
        """Frames that only cost."""
        return b""

    def call(self, number: int) -> Call:
        raise NotImplementedError

    def hear(self, data: bytes) -> None:
        raise NotImplementedError


class Http2(Speaker):
    window = 65_535
    has_windows = True

    def __init__(self, *args):
        super().__init__(*args)
        self._decoder = Decoder()
        self._names: dict[int, str] = {}  # of methods, by stream

    def opening(self) -> bytes:
        window = _WIDE if self._abuse.reads else 0
        settings = frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, window))
        return _PREFACE + settings + frame(_WINDOW, 0, 0, struct.pack(">I", _WIDE - 65_535))

    def half_opening(self) -> bytes:
        return _PREFACE[:10]

    def flood(self, number: int) -> bytes:
        match self._abuse.flood:
            case "ping":
                return 10 * frame(_PING, 0, 0, struct.pack(">Q", number))
            case "settings":
                return 10 * frame(_SETTINGS, 0, 0, struct.pack(">HI", 3, 100 + number % 7))
            case "window":
                return 10 * frame(_WINDOW, 0, 0, struct.pack(">I", 1))
        return b""

    def call(self, number: int) -> Call:
        abuse, method = self._abuse, self._methods[number % len(self._methods)]
        stream = 2 * len(self._names) + 1
        self._names[stream] = method.path.rpartition("/")[2]
        block = self._block(method, number)
        if abuse.head == "endless":
            more = frame(_CONTINUATION, 0, stream, _block([("x-more", "x" * 1000)]))
            return Call(frame(_HEADERS, 0, stream, block) + 100 * more)
        head = frame(_HEADERS, _END_HEADERS | _END_STREAM * (abuse.message == "empty"), stream, block)
        data = self._data(method.message)
        if abuse.message == "slow":
            return Call(head, drips=(frame(_DATA, 0, stream, data[at : at + 1]) for at in range(len(data))))
        if abuse.message == "crumbs":
            return Call(head, 100 * (frame(_DATA, 0, stream, b""),))
        pieces = [data[at : at + _MAX_FRAME] for at in range(0, len(data), _MAX_FRAME)]
        is_whole = abuse.message in ("whole", "garbage", "bomb")
        flags = [0] * (len(pieces) - 1) + [_END_STREAM * is_whole]
        body = [frame(_DATA, flag, stream, piece) for piece, flag in zip(pieces, flags, strict=False)]
        if abuse.ending == "cancelled":
            body.append(frame(_RESET, 0, stream, _CANCEL))
        return Call(head, tuple(body))

    def _block(self, method: Method, number: int) -> bytes:
        headers: list[tuple[str, str | bytes]] = [(":method", "POST"), (":scheme", "https"), (":path", method.path), (":authority", "localhost"),
                   ("te", "trailers"), ("content-type", "application/grpc"), *self._metadata]  # fmt: skip
        if self._abuse.message == "bomb":
            headers.append(("grpc-encoding", "gzip"))
        if self._abuse.head == "timeouts":
            headers.append(("grpc-timeout", _TIMEOUTS[number % len(_TIMEOUTS)]))
        if self._abuse.head == "no UTF-8":
            headers.append(("x-word", b"\xff"))
            headers[2] = (":path", b"/\xff" if number % 2 else method.path)
        if self._abuse.head == "metadata":
            many = [(f"x-{index}", "1") for index in range(70)]
            headers += (many, [("x-long", "x" * 12_000)], [*many[:30], ("x-long", "x" * 7000)])[number % 3]
        return _block(headers)

    def _data(self, message: bytes) -> bytes:
        match self._abuse.message:
            case "none" | "empty" | "crumbs":
                return b""
            case "half":
                return _prefixed(message)[: 5 + len(message) // 2 if message else 3]
            case "large half":
                return _prefixed(b"", _LARGE) + bytes(_LARGE // 8)
            case "slow":
                return _prefixed(b"", _LARGE) + message
            case "huge":
                return _prefixed(b"", _HUGE) + bytes(_LARGE // 64)
            case "bomb":
                return b"\x01" + _prefixed(_BOMB)[1:]
            case "garbage":
                return _prefixed(NOISE[:200])
        return _prefixed(message)

    def hear(self, data: bytes) -> None:
        self._heard += data
        while len(self._heard) >= 9:
            length = int.from_bytes(self._heard[:3], "big")
            if len(self._heard) < 9 + length:
                return
            kind, flags, stream = self._heard[3], self._heard[4], int.from_bytes(self._heard[5:9], "big") & _WIDE
            body = bytes(self._heard[9 : 9 + length])
            del self._heard[: 9 + length]
            self._on_frame(kind, flags, stream, body)

    def _on_frame(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == _HEADERS:
            self._on_headers(self._names.get(stream, ""), body)
        elif kind == _RESET:
            self.outcomes["reset"] += 1
        elif kind == _GOAWAY:
            self.outcomes["goaway"] += 1
        elif kind == _SETTINGS and not flags & _ACK:
            self._say(frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._say(frame(_PING, _ACK, 0, body))
        elif kind == _WINDOW and stream == 0:
            self.window += int.from_bytes(body, "big") & _WIDE
            self.on_window()

    def _on_headers(self, name: str, block: bytes) -> None:
        try:
            headers = dict(self._decoder.decode(block))
        except HPACKError:
            self.outcomes["unreadable"] += 1
            return
        if "grpc-status" in headers:
            self.outcomes[f"{name} {_STATUSES[headers['grpc-status']]}"] += 1
        elif headers.get(":status", "200") != "200":
            self.outcomes[f"{name} HTTP {headers[':status']}"] += 1


class Http1(Speaker):
    def half_opening(self) -> bytes:
        return b"GE"

    def call(self, number: int) -> Call:
        abuse = self._abuse
        first = f"GET {self._methods[number % len(self._methods)].path} HTTP/1.1\r\n".encode()
        head = first + b"Host: 127.0.0.1\r\n"
        if abuse.head == "endless":
            return Call(head + 100 * (b"X-More: " + 1000 * b"x" + b"\r\n"))
        if abuse.head == "metadata":
            many, long = (b"X-%d: 1\r\n" % index for index in range(700)), b"X-Long: " + 12_000 * b"x" + b"\r\n"
            head += long if number % 2 else b"".join(many)
        match abuse.message:
            case "none":
                return Call(head)
            case "half":
                return Call(first[: len(first) // 2])
            case "slow":
                return Call(drips=(head[at : at + 1] for at in range(len(head))))
            case "huge":
                return Call(head + b"Content-Length: %d\r\n\r\n" % _HUGE + bytes(_LARGE // 64))
            case "garbage":
                return Call(NOISE[:200] + b"\r\n\r\n")
        return Call(head + b"\r\n")

    def hear(self, data: bytes) -> None:
        for part in data.split(b"HTTP/1.1 ")[1:]:
            self.outcomes[f"HTTP {part[:3].decode('latin-1')}"] += 1


class Post1(Http1):
    """The same with bodies; a method without a message is a GET."""

    def call(self, number: int) -> Call:
        abuse, method = self._abuse, self._methods[number % len(self._methods)]
        verb = "POST" if method.message else "GET"
        lines = [f"{verb} {method.path} HTTP/1.1", "host: localhost", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in self._metadata]
        if abuse.head == "endless":
            return Call("\r\n".join([*lines, ""]).encode() + 100 * (b"x-more: " + 1000 * b"x" + b"\r\n"))
        if abuse.head == "metadata":
            lines += ["x-long: " + "x" * 12_000] if number % 2 else [f"x-{index}: 1" for index in range(70)]
        body = method.message or b"{}"
        sent, length = {
            "none": (b"", len(body)),
            "half": (body[: len(body) // 2], len(body)),
            "large half": (bytes(_LARGE // 8), _LARGE),
            "slow": (b"", _LARGE),
            "huge": (bytes(_LARGE // 64), _HUGE),
            "garbage": (NOISE[:200], 200),
        }.get(abuse.message, (body, len(body)))
        head = "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode()
        if abuse.message == "slow":
            return Call(head, drips=(body[at : at + 1] for at in range(len(body))))
        return Call(head + sent)


class KVFrames(Speaker):
    def half_opening(self) -> bytes:
        return self._methods[0].message[:3]

    def call(self, number: int) -> Call:
        message = self._methods[0].message
        header = message[: HEADER_BYTES - 4]  # without the length
        match self._abuse.message:
            case "none":
                return Call()
            case "half":
                return Call(message[: len(message) // 2])
            case "large half":
                return Call(header + struct.pack("<I", MAX_TAKER_FRAME_BYTES) + bytes(MAX_TAKER_FRAME_BYTES // 2))
            case "slow":
                return Call(header + struct.pack("<I", MAX_TAKER_FRAME_BYTES), drips=itertools.repeat(b"\0"))
            case "huge":
                return Call(header + struct.pack("<I", _HUGE) + bytes(_LARGE // 64))
            case "garbage":
                return Call(header + struct.pack("<I", 200) + NOISE[:200])
        return Call(message)

    def hear(self, data: bytes) -> None:
        self._heard += data
        while len(self._heard) >= HEADER_BYTES:
            length = int.from_bytes(self._heard[4:8], "little")
            if len(self._heard) < HEADER_BYTES + length:
                return
            said = kv_pb2.KVFrame.FromString(bytes(self._heard[HEADER_BYTES : HEADER_BYTES + length]))
            del self._heard[: HEADER_BYTES + length]
            self.outcomes[said.end.status if said.WhichOneof("kind") == "end" else said.WhichOneof("kind")] += 1


SPEAKERS = {GRPC: Http2, HTTP: Http1, HTTPS: Post1, FRAMES: KVFrames}


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def _block(headers: Sequence[tuple[str, str | bytes]]) -> bytes:
    """Without a trace in the other side's table, so that it is the same on every stream."""
    return Encoder().encode([NeverIndexedHeaderTuple(*each) for each in headers], huffman=False)


def _prefixed(message: bytes, length: int | None = None) -> bytes:
    return b"\0" + struct.pack(">I", len(message) if length is None else length) + message
