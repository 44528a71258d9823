"""Attacks on every port, as data: a line an abuse, a line a port, and the methods behind each port.

An abuse says how the attacker opens its connections, what it sends of each call, and how it goes; attacker.py does it
in the words of the port (`speaks`, protocol_speakers.py). A row that makes no sense in those words is not tried there
(`not_in`).
"""

import json
from typing import NamedTuple

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from baton.v1 import fleet_pb2, inference_pb2, kv_pb2, worker_pb2
from kvtransfer.wire import encode_frame

GRPC, HTTP, HTTPS, FRAMES = "grpc", "http", "https", "frames"
ALL_ON_ONE, FEW = 0, 16  # calls a connection; over HTTP more end it


class Abuse(NamedTuple):
    name: str
    what: str
    opening: str = "whole"  # of TLS and of HTTP/2: none | half | garbage | whole
    calls: int = FEW  # of one connection
    head: str = "whole"  # of a call: none | whole | endless | metadata | no UTF-8 | timeouts
    message: str = "whole"  # none | empty | half | large half | slow | huge | bomb | garbage | crumbs | whole
    reads: bool = True
    ending: str = "held"  # held | cancelled (each call, at once) | closed (each connection, at once)
    flood: str = ""  # ping | settings | window: control frames instead of calls
    answers: tuple[str, ...] = ()  # beside those that are always honest
    not_in: tuple[str, ...] = ()


ABUSES = {
    each.name: each
    for each in (
        # Connections.
        Abuse("silent connections", "connects and says nothing", opening="none", calls=1, head="none"),
        Abuse("half a handshake", "sends half of its first message and waits", opening="half", calls=1, head="none"),
        Abuse("garbage", "sends random bytes instead of a handshake", opening="garbage", calls=1, head="none"),
        Abuse("idle connections", "shakes hands and says nothing more", calls=1, head="none"),
        Abuse("reconnecting", "shakes hands, hangs up, and again", calls=1, head="none", ending="closed"),
        Abuse("pings", "PING upon PING", head="none", flood="ping", not_in=(HTTP, HTTPS, FRAMES)),
        Abuse("settings", "SETTINGS upon SETTINGS", head="none", flood="settings", not_in=(HTTP, HTTPS, FRAMES)),
        Abuse("window updates", "WINDOW_UPDATE upon WINDOW_UPDATE", head="none", flood="window", not_in=(HTTP, HTTPS, FRAMES)),
        Abuse("endless headers", "a head that does not end", head="endless", message="none", not_in=(FRAMES,)),
        # Calls.
        Abuse("no message", "calls, and its message never comes", message="none"),
        Abuse("no message, one connection", "the same, all on one connection", calls=ALL_ON_ONE, message="none"),
        Abuse("empty calls", "calls that end without a message", message="empty", not_in=(HTTP, HTTPS, FRAMES)),
        Abuse("half a message", "stops in the middle of its message", message="half"),
        Abuse("half a large message", "stops after 128 KiB of 1 MiB", message="large half", not_in=(HTTP,)),
        Abuse("slow message", "a byte now and then", message="slow"),
        Abuse("crumbs", "a message in frames without a byte", message="crumbs", not_in=(HTTP, HTTPS, FRAMES)),
        Abuse("huge message", "announces 1 GiB and begins to send it", message="huge"),
        Abuse("compressed bomb", "8 KiB that gzip makes 8 MiB of", message="bomb", not_in=(HTTP, HTTPS, FRAMES)),
        Abuse("garbage message", "a message of random bytes", message="garbage"),
        Abuse("metadata", "more entries, or longer ones, than allowed", head="metadata", not_in=(FRAMES,)),
        Abuse("no UTF-8", "a path, and metadata, that are no UTF-8", head="no UTF-8", not_in=(HTTP, HTTPS, FRAMES),
              answers=("UNKNOWN",)),  # what gRPC's library says of such a path
        Abuse("timeouts", "deadlines of 0, below 0, of 11,000 years, of letters", head="timeouts", not_in=(HTTP, HTTPS, FRAMES),
              answers=("INTERNAL",)),  # what gRPC's library says of a deadline that it cannot read
        Abuse("many streams", "calls, all on one connection", calls=ALL_ON_ONE),
        Abuse("many connections", "calls, each on a connection of its own", calls=1),
        Abuse("unread answers", "calls, and reads nothing", reads=False),
        Abuse("cancelled", "calls, and cancels at once", ending="cancelled"),
        Abuse("rapid reset", "cancels before it has sent a message", message="none", ending="cancelled"),
    )
}  # fmt: skip


class Caller(NamedTuple):
    """An attacker. `certificate`: its role; `key`: that of the flooding tenant; `calls`: it reaches a call."""

    name: str
    certificate: str | None = None
    key: bool = False
    calls: bool = True


NOBODY = Caller("no one")
FLOOD_TENANT, QUIET_TENANT = "flood", "quiet"
TENANT = Caller("one tenant", key=True)
NO_CERTIFICATE = Caller("no certificate", calls=False)


def wrong(role: str) -> Caller:
    return Caller(f"a {role}'s certificate", certificate=role)


class Method(NamedTuple):
    """`message`: one that is well, and dear."""

    path: str
    message: bytes = b""


def _generate() -> bytes:
    request = inference_pb2.GenerateRequest(text="Once upon a time")
    request.sampling.MergeFrom(inference_pb2.Sampling(temperature=0.0))
    request.stopping.MergeFrom(inference_pb2.Stopping(max_tokens=64, ignore_eos=True))
    return request.SerializeToString()


def _json(**values) -> bytes:
    return json.dumps(values).encode()


_TEXT = "<|user|>" * 400
_HEALTH = health_pb2.HealthCheckRequest().SerializeToString()
_HELLO = worker_pb2.Command(hello=worker_pb2.Hello(protocol_min=1, protocol_max=1, instance=b"i" * 16))
_WANT = encode_frame(kv_pb2.KVFrame(want=kv_pb2.Want(taker_instance=b"i" * 16, num_shares=1)))

INFERENCE = (
    Method("/baton.v1.Inference/Generate", _generate()),
    Method("/baton.v1.Inference/Complete", _generate()),
    Method("/baton.v1.Inference/Tokenize", inference_pb2.TokenizeRequest(text=_TEXT).SerializeToString()),
    Method("/baton.v1.Inference/Detokenize",
           inference_pb2.DetokenizeRequest(token_ids=[7] * 1000).SerializeToString()),
    Method("/baton.v1.Inference/Embed",
           inference_pb2.EmbedRequest(inputs=[{"token_ids": {"ids": [7] * 16}}] * 4).SerializeToString()),
    Method("/baton.v1.Inference/Score",
           inference_pb2.ScoreRequest(query=_TEXT, documents=[_TEXT] * 8).SerializeToString()),
    Method("/baton.v1.Inference/GetModelInfo"),
    Method("/baton.v1.Inference/ListModels"),
)  # fmt: skip
HEALTH = (
    Method("/grpc.health.v1.Health/Check", _HEALTH),
    Method("/grpc.health.v1.Health/Watch", _HEALTH),
)
REFLECTION = (
    Method(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString(),
    ),
)
FLEET = (
    Method("/baton.v1.Fleet/ListWorkers"),
    Method("/baton.v1.Fleet/ListRequests", fleet_pb2.ListRequestsRequest(max_recent=200).SerializeToString()),
    Method("/baton.v1.Fleet/AddModel", fleet_pb2.AddModelRequest(name="more", path="..").SerializeToString()),
    Method("/baton.v1.Fleet/RemoveModel", fleet_pb2.RemoveModelRequest(name="more").SerializeToString()),
    Method("/baton.v1.Registration/Register",
           worker_pb2.RegisterRequest(address="127.0.0.1:9", role="decode").SerializeToString()),
)  # fmt: skip
SESSION = (
    Method("/baton.v1.Worker/Session", _HELLO.SerializeToString()),
    Method("/baton.v1.Worker/Describe"),
    Method("/baton.v1.Worker/Drain"),
    Method("/baton.v1.Worker/LoadAdapter"),
    Method("/baton.v1.Worker/UnloadAdapter"),
    *HEALTH,
    *REFLECTION,
)
OPENAI = (
    Method("/v1/completions", _json(prompt=[7] * 16, max_tokens=64, ignore_eos=True, stream=True)),
    Method("/v1/chat/completions", _json(messages=[{"role": "user", "content": "Once upon a time"}], max_tokens=64)),
    Method("/v1/embeddings", _json(input=[[7] * 16] * 4)),
    Method("/v1/rerank", _json(query=_TEXT, documents=[_TEXT] * 8)),
    Method("/tokenize", _json(prompt=_TEXT)),
    Method("/detokenize", _json(tokens=[7] * 1000)),
    Method("/v1/models"),
    Method("/health"),
    Method("/openapi.json"),
)
LAUNCHER = tuple(Method(f"/baton.v1.Launcher/{name}") for name in ("StartWorkers", "DrainWorker", "WatchWorkers"))
RANKS = (Method("/baton.rank.Raw/Join"),)
KV_GRPC = (Method("/baton.kv.Raw/Pull", _WANT),)
KV_FRAMES = (Method("", _WANT),)
GATEWAY_PAGES = tuple(Method(path) for path in ("/healthz", "/readyz", "/metrics", "/", "/fleet.json"))
WORKER_PAGES = tuple(Method(path) for path in ("/healthz", "/readyz", "/metrics"))


class Port(NamedTuple):
    """`where`: the field of the ready line, or the KV transport. `kv`: what KV the stack moves while it is attacked.
    `speaks` "": listed, and not tried here."""

    name: str
    process: str
    where: str
    speaks: str
    callers: tuple[Caller, ...]
    methods: tuple[Method, ...]
    kv: str = "shm"


PORTS = {
    each.name: each
    for each in (
        Port("client", "gateway0", "grpc", GRPC, (NOBODY, TENANT), (*INFERENCE, *HEALTH, *REFLECTION)),
        Port("http", "gateway0", "http", HTTPS, (NOBODY, TENANT), OPENAI),
        Port("fleet", "gateway0", "fleet", GRPC, (NO_CERTIFICATE, wrong("gateway")), (*FLEET, *HEALTH)),
        Port("prefill session", "prefill0", "grpc", GRPC, (NO_CERTIFICATE, wrong("decode")), SESSION),
        Port("decode session", "decode0", "grpc", GRPC, (NO_CERTIFICATE, wrong("prefill")), SESSION),
        Port("gateway pages", "gateway0", "admin", HTTP, (NOBODY,), GATEWAY_PAGES),
        Port("prefill pages", "prefill0", "admin", HTTP, (NOBODY,), WORKER_PAGES),
        Port("decode pages", "decode0", "admin", HTTP, (NOBODY,), WORKER_PAGES),
        Port("KV shm", "prefill0", "shm", FRAMES, (NOBODY,), KV_FRAMES),
        Port("KV tcp", "prefill0", "tcp", FRAMES, (NOBODY,), KV_FRAMES, kv="tcp"),
        Port("KV grpc", "prefill0", "grpc", GRPC, (NO_CERTIFICATE, wrong("operator")), KV_GRPC, kv="grpc"),
        Port("KV nixl", "prefill0", "nixl", "", (), (), kv="nixl"),  # needs UCX: make test-nixl
        Port("control", "baton up", "control", "", (), LAUNCHER),  # the stack of these tests is started without it
        Port("ranks", "decode0", "ranks", "", (), RANKS),  # likewise
    )
}  # fmt: skip


class Cell(NamedTuple):
    """One abuse of one port by one caller; `methods` are tried at the same time."""

    port: Port
    abuse: Abuse
    caller: Caller
    methods: tuple[Method, ...]

    def __str__(self) -> str:
        return f"{self.port.name}-{self.abuse.name}-{self.caller.name}".replace(" ", "_")


# By what they speak, the ports whose every abuse stands for those of the others.
REPRESENTATIVES = {GRPC: "client", HTTPS: "http", HTTP: "gateway pages", FRAMES: "KV shm"}


def cells() -> list[Cell]:
    """Return all cells, ordered by the KV transport of the stack that they need."""
    found = []
    for port in PORTS.values():
        for abuse in ABUSES.values():
            if port.speaks and port.speaks not in abuse.not_in:
                found += [cell for caller in port.callers if (cell := _cell(port, abuse, caller))]
    return found


def is_chosen(cell: Cell) -> bool:
    """Return whether it is among those of a minute: each abuse in each language once, by who reaches furthest, and
    "many connections" of every port and caller."""
    port = cell.port
    stands_for_others = port.name == REPRESENTATIVES[port.speaks] and cell.caller == port.callers[-1]
    return stands_for_others or cell.abuse.name == "many connections"


def _cell(port: Port, abuse: Abuse, caller: Caller) -> Cell | None:
    """Return the cell of an attack, or None: a caller without a connection makes no call, so one abuse represents all
    of those."""
    if abuse.head == "none":
        return Cell(port, abuse, caller, port.methods[:1])
    if caller.calls:
        return Cell(port, abuse, caller, port.methods)
    return Cell(port, abuse, caller, port.methods[:1]) if abuse.name == "many connections" else None
