"""Move KV over gRPC, one stream of raw messages per dialogue, for networks that let only HTTP/2 through.

A message is a frame, or a zero byte and up to CHUNK_BYTES of a payload. KV bytes are not wrapped in protobuf; still
each byte is copied about six times on its way, so this transport is the last choice."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NamedTuple

import grpc

from baton.tasks import cancel_call
from baton.v1 import kv_pb2
from kvtransfer.errors import PeerLost, ProtocolError, received_error
from kvtransfer.memory.blocks import BlockMemory
from kvtransfer.transports import tcp
from kvtransfer.transports.socket_connection import SILENCE_S
from kvtransfer.wire import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_TAKER_FRAME_BYTES,
    decode_frame,
    encode_frame,
    frame_length,
)

SERVICE, METHOD = "baton.kv.Raw", "Pull"
# Measured with both ends on one core: 0.25, 0.38, 0.6, 0.83, 0.7 GB/s with chunks of 64, 128, 256, 512, 1000 KiB. A
# message costs 0.2 ms whatever its size, and large ones are allocated afresh, page by page.
CHUNK_BYTES = 512 << 10
_PAYLOAD = b"\0"  # first byte of a message with payload; frames begin with their magic
_MAX_WAITING = 4  # messages of a source that are read ahead; of a taker, which may be any client, one is
_DRAIN_S = 1.0
_STOP_S = 0.5
_OPTIONS = (
    ("grpc.max_send_message_length", MAX_FRAME_BYTES + HEADER_BYTES),
    ("grpc.optimization_target", "throughput"),
)
_TAKER_OPTIONS = (
    *_OPTIONS,
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES + HEADER_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # one connection per dialogue, so that no dialogue waits for another
    ("grpc.http2.lookahead_bytes", 4 << 20),
    ("grpc.enable_http_proxy", 0),  # http_proxy is for other networks; KV goes to another worker
)
_SERVER_OPTIONS = (
    *_OPTIONS,
    ("grpc.max_receive_message_length", MAX_TAKER_FRAME_BYTES + HEADER_BYTES),
    ("grpc.max_concurrent_streams", 4),  # per connection; a taker has one connection per dialogue
    # Read little ahead, since any client may connect: takers send only small frames.
    ("grpc.http2.lookahead_bytes", 4 * MAX_TAKER_FRAME_BYTES),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.so_reuseport", 0),
    # A process that hangs is noticed after the ping timeout; gRPC 1.85 ignores the timeout of keepalive.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.server_handshake_timeout_ms", 5000),  # gRPC's own is 120 s
    ("grpc.max_connection_idle_ms", 10_000),  # a dialogue's connection ends with it
    (
        "grpc.compression_enabled_algorithms_bitset",
        1 << grpc.Compression.NoCompression,
    ),  # gRPC expands a message before it checks its size
)


class Security(NamedTuple):
    """Credentials of the streams. Without any, streams are plain text and open to every process that has a ticket."""

    server: grpc.ServerCredentials | None = None
    interceptors: tuple[grpc.aio.ServerInterceptor, ...] = ()
    channel: Callable[[], grpc.ChannelCredentials] | None = None  # read anew for each connection
    server_name: str = ""  # the name that a source's certificate must have


OPEN = Security()
_BROKEN = (grpc.RpcError, grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError)


class GrpcConnection:
    """One end of a stream. Two tasks do all reads and writes of the call, since cancelling one of those would end the
    call and lose its last frames."""

    def __init__(
        self, call: "_TakerCall | _SourceCall", max_frame_bytes: int = MAX_FRAME_BYTES, max_waiting: int = _MAX_WAITING
    ):
        """Run the reading and writing tasks of `call`; `max_waiting`: how many messages are read ahead."""
        self._call = call
        self._max_frame_bytes = max_frame_bytes
        self._silence_s = SILENCE_S
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: the other side has ended
        self._room = asyncio.Semaphore(max_waiting)
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue(1)
        self._sending = asyncio.Lock()
        self._lost = ""
        self._sent_end = False
        self.ended = asyncio.Event()  # set when nothing is read or written any more
        self._reading, self._writing = asyncio.create_task(self._read()), asyncio.create_task(self._write())
        self._finishing: asyncio.Task | None = None

    @property
    def source_memory(self) -> BlockMemory | None:
        return None

    async def share_memory(self) -> None:
        """Do nothing: the source sends the bytes."""

    async def send(self, frame: kv_pb2.KVFrame, payload: Iterable[list[memoryview]] = ()) -> None:
        async with self._sending:
            await self._put(encode_frame(frame))
            self._sent_end = frame.WhichOneof("kind") == "end"
            for group in payload:
                for buffer in group:
                    for begin in range(0, len(buffer), CHUNK_BYTES):
                        await self._put(b"".join((_PAYLOAD, buffer[begin : begin + CHUNK_BYTES])))

    async def receive(self) -> kv_pb2.KVFrame:
        """Return the next frame. Raises ProtocolError if its length is not that of its message, PeerLost when the
        connection breaks."""
        message = await self._next()
        length = frame_length(message[:HEADER_BYTES], self._max_frame_bytes)
        if length != len(message) - HEADER_BYTES:
            raise ProtocolError(f"a frame of {length} bytes in a message of {len(message)}")
        return decode_frame(message[HEADER_BYTES:])

    async def receive_payload(self, groups: Iterable[list[memoryview]]) -> None:
        """Fill the groups of buffers with the next bytes. Raises ProtocolError for more bytes than announced, PeerLost
        when the connection breaks, and the error of the source's End frame if one comes instead."""
        chunk = memoryview(b"")
        for group in groups:
            for buffer in group:
                filled = 0
                while filled < len(buffer):
                    if not chunk:
                        chunk = await self._next_chunk()
                    count = min(len(chunk), len(buffer) - filled)
                    buffer[filled : filled + count] = chunk[:count]
                    filled, chunk = filled + count, chunk[count:]
        if chunk:
            raise ProtocolError(f"{len(chunk)} bytes more than were announced")

    async def _next_chunk(self) -> memoryview:
        """Return the next bytes of a payload. Raises the error of the source's End frame if one comes instead."""
        message = await self._next()
        if message[:1] == _PAYLOAD:
            return memoryview(message)[1:]
        frame_length(message[:HEADER_BYTES], self._max_frame_bytes)
        frame = decode_frame(message[HEADER_BYTES:])
        if frame.WhichOneof("kind") == "end":
            raise received_error(frame.end.status, frame.end.message)
        raise ProtocolError(f"{frame.WhichOneof('kind')} amid the bytes that were announced")

    async def drain(self) -> None:
        try:
            async with asyncio.timeout(_DRAIN_S):
                await self._outgoing.join()
                while await self._incoming.get() is not None:
                    pass
        except TimeoutError:
            pass

    def close(self) -> None:
        if self._finishing is None:
            clean = self._sent_end and not self._lost
            self._lose("the connection was closed")
            self._finishing = asyncio.create_task(self._finish(clean))

    async def _finish(self, clean: bool) -> None:
        """End the call. A cancelled call may lose the End frame that was written last, so after one the other side is
        given time to end the call first. A handler must not return during a write: gRPC would then never end the call.
        Nor is a taker's write waited for: gRPC 1.85 never wakes that of a call which is cancelled before it is sent."""
        try:
            if not clean:
                while not self._outgoing.empty():
                    self._outgoing.get_nowait()
                    self._outgoing.task_done()
            if clean or not self._call.end_cancels:
                await self._outgoing.join()
            if clean:
                await self._call.done_writing()
                await asyncio.wait({self._reading}, timeout=_DRAIN_S)
        finally:
            self._reading.cancel()
            self._writing.cancel()
            self.ended.set()
            await self._call.end()
            # The cancelled tasks' tracebacks refer to this object, in a circle. Without this its call would keep the
            # connection open until the server finds it idle (measured: 18 to 22 s), or the garbage collector runs.
            del self._reading, self._writing, self._call

    def _lose(self, why: str) -> None:
        """Wake readers and writers of this stream with the reason `why` it is lost."""
        self._lost = self._lost or why
        self._incoming.put_nowait(None)
        self._room.release()

    async def _put(self, message: bytes) -> None:
        try:
            async with asyncio.timeout(self._silence_s):
                if not self._lost:
                    await self._outgoing.put(message)
        except TimeoutError as error:
            raise PeerLost(f"the other side was silent for {self._silence_s:g} s") from error
        if self._lost:
            raise PeerLost(self._lost)

    async def _next(self) -> bytes:
        try:
            async with asyncio.timeout(self._silence_s):
                message = await self._incoming.get()
        except TimeoutError as error:
            raise PeerLost(f"the other side was silent for {self._silence_s:g} s") from error
        if message is None or (self._lost and self._finishing):
            self._incoming.put_nowait(None)
            raise PeerLost(self._lost or "the other side closed the connection")
        self._room.release()
        return message

    async def _read(self) -> None:
        """Read messages until the other side has ended the call. After `close` they are dropped."""
        try:
            await self._room.acquire()
            while (message := await self._call.read()) is not None:
                if self._finishing is None:
                    self._incoming.put_nowait(message)
                    await self._room.acquire()
        except _BROKEN as error:
            self._lost = self._lost or f"the connection broke: {_cause(error)}"
        self._incoming.put_nowait(None)  # frames can still be sent to a taker that has closed its half

    async def _write(self) -> None:
        """Write messages. They are taken from the queue even when the stream is lost, so that no sender waits for
        ever."""
        while True:
            message = await self._outgoing.get()
            try:
                await self._call.write(message)
            except _BROKEN as error:
                self._lost = self._lost or f"the connection broke: {_cause(error)}"
            finally:
                self._outgoing.task_done()


def _cause(error: Exception) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)


class _TakerCall:
    end_cancels = True

    def __init__(self, channel: grpc.aio.Channel):
        self._channel = channel
        self._call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()

    async def read(self) -> bytes | None:
        message = await self._call.read()
        return None if message is grpc.aio.EOF else message

    async def write(self, message: bytes) -> None:
        await self._call.write(message)

    async def done_writing(self) -> None:
        await self._call.done_writing()

    async def end(self) -> None:
        cancel_call(self._call)
        await self._channel.close()


class _SourceCall:
    end_cancels = False  # a taker that no longer reads is dropped with its connection, see _SERVER_OPTIONS

    def __init__(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext):
        self._messages, self._context = messages, context

    async def read(self) -> bytes | None:
        return await anext(self._messages, None)

    async def write(self, message: bytes) -> None:
        await self._context.write(message)

    async def done_writing(self) -> None:
        """Do nothing: the handler's return ends the call."""

    async def end(self) -> None:
        """Do nothing: the handler's return ends the call."""


class GrpcListener:
    """Accept takers over a gRPC server of one method, which listens on `port`."""

    def __init__(self, server: grpc.aio.Server, on_connection: Callable):
        self._server = server
        self._on_connection = on_connection
        self.port = 0
        handler = grpc.stream_stream_rpc_method_handler(self._pull)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))

    async def _pull(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        connection = GrpcConnection(_SourceCall(messages, context), MAX_TAKER_FRAME_BYTES, max_waiting=1)
        self._on_connection(connection)
        try:
            await connection.ended.wait()
        finally:
            connection.close()

    async def close(self) -> None:
        await self._server.stop(_STOP_S)


async def listen(host: str, on_connection: Callable, security: Security = OPEN, port: int = 0) -> GrpcListener:
    """Listen for takers; `port` 0: the system chooses. Raises OSError, which names the host."""
    if port:
        (await tcp.listening(host, port)).close()  # raises if it is taken; gRPC would write many lines to stderr
    server = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=security.interceptors)
    listener = GrpcListener(server, on_connection)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if security.server:
            listener.port = server.add_secure_port(address, security.server)
        else:
            listener.port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen for KV over gRPC on {host}: {error}") from error
    await server.start()
    return listener


async def connect(address: str, security: Security = OPEN) -> GrpcConnection:
    """Connect to a source at `address`, host:port. Raises PeerLost."""
    channel = _channel(address, security)
    try:
        async with asyncio.timeout(tcp.CONNECT_S):
            while (state := channel.get_state(try_to_connect=True)) != grpc.ChannelConnectivity.READY:
                if state == grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    raise PeerLost(f"the source cannot be reached at {address}")
                await channel.wait_for_state_change(state)
    except TimeoutError as error:
        await channel.close()
        raise PeerLost(f"the source cannot be reached at {address} within {tcp.CONNECT_S:g} s") from error
    except BaseException:
        await channel.close()
        raise
    return GrpcConnection(_TakerCall(channel))


def _channel(address: str, security: Security) -> grpc.aio.Channel:
    if security.channel is None:
        return grpc.aio.insecure_channel(address, options=_TAKER_OPTIONS)
    try:
        credentials = security.channel()
    except OSError as error:  # a certificate may be missing while it is replaced
        raise PeerLost(f"{error.filename}: {error.strerror}") from error
    named = ("grpc.ssl_target_name_override", security.server_name)
    return grpc.aio.secure_channel(address, credentials, options=(*_TAKER_OPTIONS, named))
