"""Print the findings of `baton doctor`, as lines or as one JSON document at the end, and describe workers and faults in
words, with advice."""

import asyncio
import json
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import grpc

from baton.addresses import AddressError, split_address
from baton.service.logs import printable
from baton.service.net.client import certificate_end, connect, wrong_access
from baton.service.net.collector import collector_credentials
from baton.service.security.access import Access
from baton.service.security.tls import end_of
from baton.v1 import fleet_pb2
from baton.v1 import worker_pb2 as pb

_SOON_S = 14 * 86400.0  # as in the alert BatonCertificateEnds
_CLOCK_S = 2.0  # more than NTP leaves, or a slow answer
_COLLECTOR_S = 3.0
_MARKS = {"ok": "  ok  ", "note": "   -  ", "warning": "  WARN", "failure": "  FAIL"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `status` is ok, note, warning (a request may still work) or failure (it does not)."""

    status: str
    part: str
    where: str
    text: str
    advice: str = ""


@dataclass
class Findings:
    """All findings, and whether a request works."""

    is_json: bool = False
    found: list[Finding] = field(default_factory=list)
    request_works: bool = False

    def say(self, part: str, where: str, text: str) -> None:
        self._add(Finding("ok", part, where, text))

    def note(self, part: str, where: str, text: str) -> None:
        self._add(Finding("note", part, where, text))

    def warn(self, part: str, where: str, text: str, advice: str) -> None:
        self._add(Finding("warning", part, where, text, advice))

    def fail(self, part: str, where: str, text: str, advice: str) -> None:
        self._add(Finding("failure", part, where, text, advice))

    def trying(self, part: str, where: str) -> None:
        """Show on a terminal what is being checked, until its line is printed."""
        if not self.is_json and sys.stdout.isatty():
            print(printable(f"  ...   {part:<9} {where}"), end="\r", flush=True)

    def close(self) -> None:
        """Print the verdict, or the JSON document."""
        if self.is_json:
            print(
                json.dumps(
                    {"request_works": self.request_works, "checks": [asdict(one) for one in self.found]}, indent=2
                )
            )
            return
        num = sum(one.status == "warning" for one in self.found)
        verdict = "OK: a request works" if self.request_works else "FAILED: a request does not work"
        print(verdict + (f"; {num} {'warning' if num == 1 else 'warnings'}" if num else ""))

    def _add(self, finding: Finding) -> None:
        self.found.append(finding)
        if not self.is_json:
            text = f"{finding.text}: {finding.advice}" if finding.advice else finding.text
            clear = "\033[K" if sys.stdout.isatty() else ""
            print(
                printable(f"{_MARKS[finding.status]}  {finding.part:<9} {finding.where:<33} {text}") + clear, flush=True
            )


def advice_for(message: str) -> str:
    """Return the one thing to do about a failed handover."""
    for sign, advice in _ADVICE:
        if sign in message:
            return advice
    return "look into both workers' logs"


_ADVICE: Sequence[tuple[str, str]] = (
    ("no transport", "give both workers a transport in common (--transports)"),
    ("source cannot be reached", "open the source's --kv-port to the taker, or correct its --advertise-host"),
    ("the source keeps", "start both workers with the same model and a --kv-dtype that can be converted"),
    ("the source computes", "start both workers with the same model, --dtype and kernels"),
    ("kv_full", "it has no room now: try again, or give it more --num-blocks"),
    ("queue_full", "it has no room now: try again when it has less to do"),
    ("draining", "it is being stopped: start it again"),
)


def describe_unreachable(
    error: grpc.aio.AioRpcError, target: str, access: Access, what: str, flag: str
) -> tuple[str, str]:
    """Return what is wrong with a call to `target`, which `flag` sets, and what to do. Takes up to 4 s."""
    if wrong := wrong_access(target, error.code(), error.details(), access):
        return wrong
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return f"something else than a {what} answers there", f"correct {flag}"
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return f"no {what} answers there", f"start it, or correct {flag}"
    return f"{error.code().name}: {error.details()}", "look into its log"


async def check_certificates(addresses: Iterable[str], access: Access, report: Findings) -> None:
    """Warn about certificates, ours and those of servers, that have ended or end soon. Takes up to 2 s."""
    if access.tls_ca is None:
        return
    shown = dict.fromkeys(addresses)
    found = await asyncio.gather(*(asyncio.to_thread(certificate_end, each) for each in shown))
    ends = dict(zip(shown, found, strict=True))
    if access.tls_cert is not None:
        with suppress(ValueError):
            ends[str(access.tls_cert)] = end_of(access.tls_cert.read_bytes())
    for where, end in ends.items():
        if end is not None and (left_s := end - time.time()) < _SOON_S:
            day = time.strftime("%Y-%m-%d", time.gmtime(end))
            expiry = f"ended on {day}" if left_s < 0 else f"ends on {day}"
            report.warn("tls", where, f"its certificate {expiry}", "renew it; processes read new files by themselves")


async def check_collector(url: str, report: Findings) -> None:
    """Connect to the collector of spans as the exporters do, through the environment's `http_proxy`. Takes up to 3
    s."""
    address = (url.partition("://")[2] or url).partition("/")[0]
    try:
        split_address(address)
        credentials = collector_credentials(url, "TRACES")
        secure = credentials and grpc.aio.secure_channel(address, credentials)
        channel = secure or grpc.aio.insecure_channel(address)
        async with channel, asyncio.timeout(_COLLECTOR_S):
            await connect(channel)
    except (AddressError, OSError, TimeoutError, grpc.aio.AioRpcError) as error:
        words = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        advice = "start it, correct or unset OTEL_EXPORTER_OTLP_ENDPOINT, or name its host in no_proxy"
        report.warn("collector", url, words or "no answer", advice)
    except ValueError as error:
        report.warn("collector", url, str(error), "correct it for all processes: their exporters read it too")
    else:
        report.say("collector", url, "accepts connections from here")


def describe_unused(view: fleet_pb2.WorkerView) -> tuple[str, str] | None:
    """Return why a gateway gives no request to a worker that it should use, and what to do; None if it uses the
    worker."""
    if view.state == "connecting":
        return f"which it cannot reach, {view.reason}", "look at names, networks and certificates between the two"
    if view.state == "stalled":
        return "which has work and does not step", "look into its log, and restart it"
    if view.breaker == "open":
        return "which left requests without an answer", "look into its log, and restart it"
    return None


def say_worker(
    role: str, address: str, hello: pb.Hello, offset_s: float, round_trip_s: float, report: Findings
) -> None:
    """Report what a worker serves and how far its clock is off; warn if that is too far."""
    served = _describe_worker(hello)
    if abs(offset_s) > _CLOCK_S + round_trip_s:
        told = f"{served}; its clock is {abs(offset_s):,.0f} s {'ahead of' if offset_s > 0 else 'behind'} this host's"
        advice = (
            "set the one that is wrong, by NTP: certificates and credentials end by it; leases and deadlines do not"
        )
        report.warn(role, address, told, advice)
    else:
        clock = f"clock {1e3 * offset_s:+.1f} ms (round trip {1e3 * round_trip_s:.1f} ms)"
        report.say(role, address, f"{served}; {clock}")


def _describe_worker(hello: pb.Hello) -> str:
    card = hello.model
    cache = "on" if card.prefix_cache else "off"
    return (
        f"{card.name} {card.family} {hello.model_identity.hex()} {card.dtype}, quantization {card.quantization}, kv {card.kv_dtype}, "
        f"attention {card.attention}, linear {card.linear}, speculator {card.speculator}, prefix cache {cache}, context {_context(hello.limits)}"
    )


def describe_ranks(group: pb.RankGroup) -> list[str]:
    """Describe the ranks of a worker, a line for each stage, and how fast they sum."""
    width, lines = len(group.ranks) // max(1, group.num_stages), []
    for stage in range(group.num_stages):
        ranks = [_rank(rank) for rank in group.ranks[stage * width : (stage + 1) * width]]
        lines.append(f"{f'stage {stage}: ' if group.num_stages > 1 else ''}{' | '.join(ranks)}")
    if group.sum_row_us:
        speed = f"{group.sum_bytes_per_s / 1e9:.2f} GB/s, {group.sum_bytes_per_s / group.copy_bytes_per_s:.2f} of"
        lines.append(f"a sum of one row takes {group.sum_row_us:.0f} us, of a step {speed} its host's copy")
    return lines


def _rank(rank: pb.Rank) -> str:
    nodes = f", NUMA {rank.numa_nodes}" if rank.numa_nodes else ""
    return f"{rank.where} {rank.weight_bytes / (1 << 20):.1f} MiB{nodes}"


def _context(limits: pb.Limits) -> str:
    """Describe the longest sequence that a worker accepts, and what limits it."""
    if limits.max_model_len >= limits.model_context:
        return str(limits.max_model_len)
    is_pool = limits.max_model_len == limits.num_blocks * limits.block_size
    why = ": its KV pool holds no more, give it more --num-blocks" if is_pool else ""
    return f"{limits.max_model_len} of the model's {limits.model_context}{why}"


def describe_layout(hello: pb.Hello) -> str:
    """Describe the layout of a worker's KV blocks."""
    groups = ", ".join(
        f"{group.num_layers} layers x {group.num_kv_heads} heads x {group.head_dim} {group.form}"
        for group in hello.layout.groups
    )
    return f"{groups}, blocks of {hello.limits.block_size}"
