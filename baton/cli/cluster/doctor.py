"""`baton doctor`: check whether a request works, and if not, name the one thing to do. It moves real blocks to find
out."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from baton.cli.cluster.findings import (
    Findings,
    advice_for,
    check_certificates,
    check_collector,
    describe_layout,
    describe_ranks,
    describe_unreachable,
    describe_unused,
    say_worker,
)
from baton.cli.cluster.handover import Handover, HandoverFailed, Session, copy_rate, measure, prove
from baton.cli.gpu import doctor as gpu_doctor
from baton.client import NO_RETRIES, AsyncClient, CallError
from baton.lines import describe_error
from baton.protocol import ROLES
from baton.service.arguments import add_command, host_port, host_ports
from baton.service.exits import WRONG_USE, fail
from baton.service.net.client import open_channel, wrong_access
from baton.service.security.access import Access, add_access_flags, read_access
from baton.service.security.tls import WORKER_NAME
from baton.service.settings import SettingsError
from baton.v1 import fleet_pb2, fleet_pb2_grpc, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from gateway.store.redis_url import MALFORMED, check_url, without_password

DEFAULT_TARGET = "127.0.0.1:50051"
_ANSWER_S = 3.0
_REQUEST_S = 10.0
_HANDOFF_S = 6.0
# from the start; measurements that would begin later are left out, so that everything ends within 30 s
_MEASURING_S = 12.0
_LIMIT_S = 28.0  # for everything
_NUM_PINGS = 5
_NUM_RUNS = 3
_HANDOFF_ERRORS = (HandoverFailed, TimeoutError, grpc.aio.AioRpcError)


@dataclass
class Found:
    """The stack to check: addresses of workers by role; the models, Redis and collector that the gateway reports; and
    `unused`: workers that it does not use though it should, with the reason and what to do."""

    prefill: list[str] = field(default_factory=list)
    decode: list[str] = field(default_factory=list)
    redis: str = ""
    collector: str = ""
    models: dict[str, str] = field(default_factory=dict)
    unused: dict[str, tuple[str, str]] = field(default_factory=dict)
    undecided: str = "give --target or --decode-workers"  # what to do if no decode worker is known


_EXAMPLES = """
baton doctor
baton doctor --json --target host:50052 --tls-ca certs/ca.crt --tls-cert certs/operator.crt --tls-key certs/operator.key
baton doctor --gpu --model ./Llama-3.1-8B
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "doctor",
        summary="check a running stack, part by part, by moving real blocks",
        description="Sends a request to each model and checks gateway, workers, KV transfer, Redis and collector, within 30 s. "
        "Exit 0 if requests work (without --target: if a prompt's KV reaches a decode worker), 1 if not.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "--target", type=host_port, metavar="HOST:PORT", help=f"gateway (default: {DEFAULT_TARGET}, unless workers)"
    )
    for role in ROLES:
        parser.add_argument(f"--{role}-workers", type=host_ports, default=[], metavar="A,B", help="without a gateway")
    parser.add_argument("--redis", default="", metavar="URL", help="prefix index (default: the gateway's)")
    parser.add_argument("--collector", default="", metavar="URL", help="OTLP endpoint (default: the gateway's)")
    parser.add_argument("--json", action="store_true", help="one document, at the end")
    gpu_doctor.add_flags(parser)
    add_access_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the stack; return 0 if a request works, 1 if not, 2 for wrong use."""
    if args.gpu or args.model is not None:
        return gpu_doctor.run(args)
    report = Findings(args.json)
    try:
        asyncio.run(_examine_within_limit(args, read_access(args), report))
    except KeyboardInterrupt:
        return 1
    except SettingsError as error:
        return fail("baton doctor", error, WRONG_USE)
    report.close()
    return 0 if report.request_works else 1


async def _examine_within_limit(args: argparse.Namespace, access: Access, report: Findings) -> None:
    try:
        async with asyncio.timeout(_LIMIT_S):
            await _examine(args, access, report)
    except TimeoutError:
        report.warn(
            "doctor", "-", f"stopped after {_LIMIT_S:.0f} s, before all parts were checked", "see what answered"
        )


async def _examine(args: argparse.Namespace, access: Access, report: Findings) -> None:
    """Check everything. A request through the gateway decides the result; without a gateway, a prompt that is handed
    over."""
    until = time.monotonic() + _MEASURING_S
    found = Found(args.prefill_workers, args.decode_workers, args.redis, args.collector)
    target = args.target or (None if found.prefill or found.decode else DEFAULT_TARGET)
    if target:
        await _gateway(target, access, found, report)
        report.request_works = await _requests(target, access, report)
    if found.redis:
        await _redis(found.redis, bool(args.redis), report)
    if found.collector:
        await check_collector(found.collector, report)
    async with _Channels(access) as channels:
        hellos = await _workers(channels, found, report)
        # workers that do not answer already have a line with the reason
        for address in sorted(found.unused.keys() & hellos):
            reason, advice = found.unused[address]
            report.warn("gateway", str(target), f"does not use {address}, {reason}", advice)
        prefill = [address for address in found.prefill if address in hellos]
        decode = [address for address in found.decode if address in hellos]
        model_of = {address: _model_of(address, hellos[address], found) for address in (*prefill, *decode)}
        for model in dict.fromkeys(model_of.values()):
            _same_model({address: hellos[address] for address in model_of if model_of[address] == model}, report)
        pairs = [(source, taker) for source in prefill for taker in decode if model_of[source] == model_of[taker]]
        works = [await _handoff(channels, *pair, until, report) for pair in pairs if time.monotonic() < until]
        if len(works) < len(pairs):
            report.note(
                "handoff", "-", f"{len(pairs) - len(works)} of {len(pairs)} pairs of workers were not tried: no time"
            )
        report.request_works |= not target and any(works)
    await check_certificates([*([target] if target else []), *found.prefill, *found.decode], access, report)


# ---- the parts ----


async def _gateway(target: str, access: Access, found: Found, report: Findings) -> None:
    """Report whether the gateway serves, and add its workers, Redis and collector to those that were given."""
    async with open_channel(target, access) as channel:
        try:
            stub = fleet_pb2_grpc.FleetStub(channel)
            fleet = await stub.ListWorkers(fleet_pb2.ListWorkersRequest(), timeout=_ANSWER_S)
        except grpc.aio.AioRpcError as error:
            found.undecided = "the gateway does not tell, give --decode-workers"
            finding = await asyncio.to_thread(describe_unreachable, error, target, access, "gateway", "--target")
            return report.warn("gateway", target, *finding)
    found.undecided = "start one that this gateway knows (--gateways), or give --decode-workers"
    if fleet.not_ready:
        report.warn("gateway", target, f"not ready, {fleet.not_ready}", "see the workers below")
    else:
        num_workers = sum(view.state != "left" for view in fleet.workers)
        report.say("gateway", target, f"ready, {num_workers} workers")
    for view in fleet.workers:
        if view.state == "left":
            report.note("gateway", target, f"{view.address} has not come back: {view.reason}")
            continue
        addresses = found.prefill if view.role == "prefill" else found.decode
        if view.address not in addresses:
            addresses.append(view.address)
        found.models[view.address] = view.model
        if view.state == "refused":
            report.warn("gateway", target, f"refuses {view.address}, which {view.reason}", "start it as its list says")
        elif finding := describe_unused(view):
            found.unused[view.address] = finding
    found.redis = found.redis or fleet.redis_url
    found.collector = found.collector or fleet.collector
    if fleet.redis_down:
        advice = "mend that there, or correct --redis of the gateway"
        report.warn("gateway", target, f"index not in use, {fleet.redis_down}", advice)


async def _redis(url: str, is_whole: bool, report: Findings) -> None:
    """Report whether Redis answers. `is_whole`: the URL has its password. The URL that a gateway reports has none, so a
    Redis that asks for one counts as answering."""
    import redis.asyncio

    begun, advice = time.monotonic(), "start it, correct --redis, or leave it out"
    try:
        check_url(url)
        client = redis.asyncio.from_url(url, socket_connect_timeout=_ANSWER_S, socket_timeout=_ANSWER_S)
    except ValueError:  # its message may hold a piece of the password
        return report.warn("redis", "--redis", MALFORMED, advice)
    ignored = () if is_whole else (redis.AuthenticationError,)
    try:
        with suppress(*ignored):
            await client.ping()
    except (redis.RedisError, OSError, ValueError) as error:
        report.warn("redis", without_password(url), describe_error(error), advice)
    else:
        took_ms = 1e3 * (time.monotonic() - begun)
        report.say("redis", without_password(url), f"answers, {took_ms:.1f} ms with connecting")
    finally:
        await client.aclose()


async def _workers(channels: _Channels, found: Found, report: Findings) -> dict[str, pb.Hello]:
    """Return the Hello of each worker that answers, by address, and warn about the others. All are asked in
    parallel."""
    hellos: dict[str, pb.Hello] = {}
    asked = [*(("prefill", address) for address in found.prefill), *(("decode", address) for address in found.decode)]
    answers = await asyncio.gather(*(_describe(channels.to(address)) for _, address in asked), return_exceptions=True)
    for (role, address), answer in zip(asked, answers, strict=True):
        if isinstance(answer, grpc.aio.AioRpcError):
            finding = await asyncio.to_thread(
                describe_unreachable, answer, address, channels.access, f"{role} worker", f"--{role}-workers"
            )
            report.warn(role, address, *finding)
            continue
        if isinstance(answer, BaseException):
            raise answer
        hello, offset_s, round_trip_s = answer
        if role not in hello.roles:
            report.warn(role, address, f"is a {'/'.join(hello.roles)} worker", f"take it out of --{role}-workers")
            continue
        hellos[address] = hello
        say_worker(role, address, hello, offset_s, round_trip_s, report)
        for line in describe_ranks(hello.group):
            report.say("ranks", address, line)
    if not found.decode:
        report.warn("decode", "-", "no decode worker is known", found.undecided)
    return hellos


def _model_of(address: str, hello: pb.Hello, found: Found) -> str:
    """Return the model that a worker should serve, as the gateway says or else the worker; empty if there is only one
    model."""
    if len(set(filter(None, found.models.values()))) < 2:
        return ""
    return found.models.get(address) or hello.model.name


def _same_model(hellos: dict[str, pb.Hello], report: Findings) -> None:
    """Warn about workers whose model differs from the first worker's."""
    for address, hello in list(hellos.items())[1:]:
        first, other = next(iter(hellos.items()))
        for name, what in (("model_identity", "model (config or weights)"), ("tokenizer_digest", "tokenizer.json")):
            if getattr(hello, name) != getattr(other, name):
                report.warn("model", address, f"serves another {what} than {first}", "start all with the same --model")
                break


async def _handoff(channels: _Channels, source: str, taker: str, until: float, report: Findings) -> bool:
    """Return whether a prompt's KV reaches the decode worker by the transport that it chooses. Other transports are
    tried and reported while there is time."""
    from kvtransfer.capabilities import CAPABILITIES

    where, works = f"{source} > {taker}", False
    report.trying("handoff", where)
    try:
        async with Session(channels.to(source), source) as prefill, Session(channels.to(taker), taker) as decode:
            _layouts(prefill.hello, decode.hello, where, report)
            proof = await prove(prefill, decode, _HANDOFF_S)
            works, took_ms = True, 1e3 * proof.ttft_s
            report.say(
                "handoff",
                where,
                f"{proof.num_tokens} tokens came while they were computed, first token after {took_ms:.0f} ms",
            )
            bytes_per_s, runs = await asyncio.to_thread(copy_rate), []
            while len(runs) < _NUM_RUNS and (not runs or time.monotonic() < until):
                runs.append(await measure(prefill, decode, None, proof, _HANDOFF_S))
            chosen = min(runs, key=lambda run: run.transfer_s)  # the first run touches memory that is not mapped yet
            report.say("handoff", where, f"{chosen.rate_beside(bytes_per_s)}, chosen")
            offered = set(prefill.hello.model.transports) & set(decode.hello.model.transports)
        for name in sorted(offered - {chosen.transport}):
            if not CAPABILITIES[name].same_process and time.monotonic() < until:
                await _try(channels, source, taker, name, proof, bytes_per_s, report)
    except _HANDOFF_ERRORS as error:
        report.warn("handoff", where, _reason_of(error), advice_for(str(error)))
    return works


async def _try(
    channels: _Channels, source: str, taker: str, name: str, proof: Handover, bytes_per_s: float, report: Findings
) -> None:
    """Measure one transport in new sessions, so that a failure ends no other measurement."""
    where = f"{source} > {taker}"
    try:
        async with Session(channels.to(source), source) as prefill, Session(channels.to(taker), taker) as decode:
            tried = await measure(prefill, decode, name, proof, _HANDOFF_S)
        report.say("handoff", where, tried.rate_beside(bytes_per_s))
    except _HANDOFF_ERRORS as error:
        report.note("handoff", where, f"{name}: {_reason_of(error)}")


def _reason_of(error: Exception) -> str:
    match error:
        case TimeoutError():
            return f"no end within {_HANDOFF_S:.0f} s"
        case grpc.aio.AioRpcError():
            return f"{error.code().name}: {error.details()}"
    return str(error)


def _layouts(prefill: pb.Hello, decode: pb.Hello, where: str, report: Findings) -> None:
    if prefill.layout != decode.layout:
        report.note("layouts", where, f"{describe_layout(prefill)} is converted to {describe_layout(decode)}")
    elif prefill.numerics_class == decode.numerics_class:
        report.say("layouts", where, f"equal: {describe_layout(prefill)}")
    else:
        report.note("layouts", where, f"equal, but of other kernels or another build: {describe_layout(prefill)}")


async def _requests(target: str, access: Access, report: Findings) -> bool:
    """Return whether each model answers a request for two tokens through the gateway; all are asked in parallel."""
    report.trying("request", target)
    async with AsyncClient(target, timeout_s=_REQUEST_S, retry=NO_RETRIES, **access.for_client()) as client:
        try:
            models = [info.name for info in await client.list_models()]
        except CallError as error:
            wrong = await asyncio.to_thread(wrong_access, target, error.code(), error.message, access)
            # an error without a reason is gRPC's own
            advice = "look into the gateway's log" if error.reason else "start it, or correct --target"
            report.fail("request", target, *(wrong or (str(error), advice)))
            return False
        return all(await asyncio.gather(*(_request(client, target, model, models, report) for model in models)))


async def _request(client: AsyncClient, target: str, model: str, models: Sequence[str], report: Findings) -> bool:
    named = f"{model}: " if len(models) > 1 else ""
    begun = time.monotonic()
    try:
        answer = await client.generate("Is anyone there?", model=model, max_tokens=2)
    except CallError as error:
        report.fail("request", target, f"{named}{error}", "look into the gateway's log")
        return False
    took_ms = 1e3 * (time.monotonic() - begun)
    report.say("request", target, f"{named}{answer.usage.output_tokens} tokens in {took_ms:.0f} ms")
    return True


# ---- helpers ----


class _Channels:
    """One channel per address, closed together."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> _Channels:
        return self

    async def __aexit__(self, *exc) -> None:
        for channel in self._channels.values():
            await channel.close()

    def to(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address, self.access, WORKER_NAME)
        return self._channels[address]


async def _describe(channel: grpc.aio.Channel) -> tuple[pb.Hello, float, float]:
    """Return a worker's Hello, its clock's offset to ours and the round-trip time (s), from the quickest of a few
    calls."""
    stub = worker_pb2_grpc.WorkerStub(channel)
    pings: list[tuple[pb.Hello, float, float]] = []
    for _ in range(_NUM_PINGS):
        sent_ns, begun = time.time_ns(), time.monotonic()
        hello = await stub.Describe(pb.DescribeRequest(), timeout=_ANSWER_S)
        round_trip_s = time.monotonic() - begun
        pings.append((hello, (hello.wall_time_ns - sent_ns) / 1e9 - round_trip_s / 2, round_trip_s))
    return min(pings, key=lambda ping: ping[2])
