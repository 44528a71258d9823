"""J2: workers and gateways of other versions. A translator between the two tells what either says in the words of
another contract: with fields that are unknown here, without those that came later, or under another number."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.protobuf.message import Message

from baton.v1 import worker_pb2 as pb
from tests.support.faults.proxy import FaultProxy
from tests.support.faults.world import ProxiedStack
from tests.support.process import Process

_SESSION = "/baton.v1.Worker/Session"
_FIRST_LATER_FIELD = 20  # of worker.proto: what has been added since the first contract is numbered from here
_UNKNOWN_FIELD = b"\xfa\x7f\x03new"  # number 2047
Change = Callable[[Message], None]


def unchanged(message: Message) -> None:
    pass


def newer(message: Message) -> None:
    """Add a field that this build does not know in every message, and more versions than one."""
    for each in _walk(message):
        each.MergeFromString(_UNKNOWN_FIELD)
    if message.HasField("hello"):
        message.hello.protocol_max = 7
        message.hello.features.append("from another day")


def older(message: Message) -> None:
    """Change a message to what a build writes that knows the first contract only."""
    for each in list(_walk(message)):
        for field, _ in each.ListFields():
            if field.number >= _FIRST_LATER_FIELD:
                each.ClearField(field.name)


def incompatible(message: Message) -> None:
    if message.HasField("hello"):
        message.hello.protocol_min, message.hello.protocol_max = 2, 3


def other_layout(message: Message) -> None:
    """KV has another order there."""
    if message.HasField("hello"):
        hello = message.hello
        hello.layout.version += 1
        for words in (hello.kv_gives, hello.kv_takes):
            words[:] = [word.replace("v1 ", "v2 ", 1) for word in words]


def _walk(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type and not field.message_type.GetOptions().map_entry:
            for each in [value] if isinstance(value, Message) else value:
                yield from _walk(each)


class Translator(grpc.GenericRpcHandler):
    """A gRPC server at `address` that passes all calls on to `target`; `commands` and `events` change the messages."""

    def __init__(self, target: str):
        self.commands: Change = unchanged
        self.events: Change = unchanged
        self._channel = grpc.insecure_channel(target)
        self._threads = ThreadPoolExecutor(16)
        self._server = grpc.server(self._threads, handlers=(self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(0)
        self._channel.close()
        self._threads.shutdown(wait=False)

    def service(self, handler_call_details) -> grpc.RpcMethodHandler:
        """Called by gRPC. A call of one message is a stream of one on the wire."""
        method = handler_call_details.method

        def relay(requests, context) -> Iterator[bytes]:
            call = self._channel.stream_stream(method)(self._translated(requests, method, pb.Command))
            context.add_callback(call.cancel)
            try:
                yield from self._translated(call, method, pb.Event)
            except grpc.RpcError as error:
                context.set_trailing_metadata(error.trailing_metadata() or ())
                context.abort(error.code(), error.details())

        return grpc.stream_stream_rpc_method_handler(relay)

    def _translated(self, messages: Iterable[bytes], method: str, kind: type[Message]) -> Iterator[bytes]:
        for data in messages:
            if method != _SESSION:
                yield data
                continue
            message = kind.FromString(data)
            (self.commands if kind is pb.Command else self.events)(message)
            yield message.SerializeToString()


class TranslatedStack(ProxiedStack):
    """The gateway meets a translator (`translators`, by process name) behind each worker's proxy."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.translators: dict[str, Translator] = {}

    def close_proxies(self) -> None:
        super().close_proxies()
        for translator in self.translators.values():
            translator.close()

    def translate(self, processes: Iterable[Process], commands: Change, events: Change) -> None:
        """Translate from the next session on, which begins now."""
        for process in processes:
            translator = self.translators[process.name]
            translator.commands, translator.events = commands, events
            self.proxies[process.name].reset()

    def _ensure_proxy(self, process: Process) -> None:
        if process.name not in self.proxies and process not in self.gateways:
            self.translators[process.name] = Translator(self.address[process.name])
            self.proxies[process.name] = FaultProxy(self.translators[process.name].address)
        super()._ensure_proxy(process)
