"""`baton top`: show the fleet in a terminal every second: rates, queues, KV, latencies, and in which phase a worker is
slow."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import textwrap
import time
from collections import Counter

import grpc

from baton.loadgen.summary import percentile
from baton.service.arguments import add_command, host_port
from baton.service.exits import FAILED, WRONG_USE, fail
from baton.service.logs import printable
from baton.service.net.client import explain_failure, open_channel
from baton.service.security.access import add_access_flags, read_access
from baton.service.settings import SettingsError
from baton.v1 import fleet_pb2 as pb
from baton.v1 import fleet_pb2_grpc

DEFAULT_TARGET = "127.0.0.1:50051"
_CLEAR = "\x1b[H\x1b[2J"
_OUTCOMES = ("ok", "cancelled", "refused", "failed")
_HOLDERS = ("quarantined", "fetching", "leased", "running", "cached", "free")


_EXAMPLES = """
baton top
baton top --once --target host:50052 --tls-ca certs/ca.crt --tls-cert certs/operator.crt --tls-key certs/operator.key
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "top",
        summary="watch a running stack in the terminal",
        description="Show latencies, workers, KV, running requests and what bounds the stack, again and again; the gateway's admin page "
        "shows the same.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "--target", type=host_port, default=DEFAULT_TARGET, metavar="HOST:PORT", help="gateway (default: %(default)s)"
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one look and end")
    add_access_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the fleet; return 0 after --once, Ctrl-C or a closed pipe, 1 if no gateway answers, 2 for wrong use."""
    if not 0 < args.interval <= 3600:
        return fail("baton top", f"--interval {args.interval}: must be above 0 and at most 3600", WRONG_USE)
    try:
        asyncio.run(_watch(args))
    except SettingsError as error:
        return fail("baton top", error, WRONG_USE)
    except KeyboardInterrupt:
        print()
    except grpc.aio.AioRpcError as error:
        message = explain_failure(args.target, error.code(), error.details(), read_access(args))
        return fail("baton top", message, FAILED)
    return 0


async def _watch(args: argparse.Namespace) -> None:
    async with open_channel(args.target, read_access(args)) as channel:
        stub, before = fleet_pb2_grpc.FleetStub(channel), None
        while True:
            workers = await stub.ListWorkers(pb.ListWorkersRequest(), timeout=3)
            requests = await stub.ListRequests(pb.ListRequestsRequest(), timeout=3)
            now = (time.monotonic(), requests)
            text = frame(args.target, workers, requests, _rates(before, now))
            if args.once:
                print(text)
                return
            print(f"{_CLEAR}{text}", flush=True)
            before = now
            await asyncio.sleep(args.interval)


def frame(target: str, workers: pb.ListWorkersResponse, requests: pb.ListRequestsResponse, rates: str) -> str:
    """Return one screen, cut to the terminal's width."""
    state = f"not ready: {workers.not_ready}" if workers.not_ready else "ready"
    lines = [f"baton {target}  {state}  up {requests.uptime_s:.0f} s  {rates}", *_latencies(requests), ""]
    if len(workers.models) > 1:
        lines += [
            f"{'MODEL':32}{'STATE':10}{'RUN':>5}{'WAIT':>6}  PREFILL, DECODE WORKERS",
            *map(_model, workers.models),
            "",
        ]
    lines += [f"{'WORKER':32}{'STATE':10}{'RUN':>5}{'WAIT':>6}{'TOK/S':>8}  {'KV in use, cached, free':25}CLOCK"]
    lines += [_worker(view, len(workers.models) > 1) for view in workers.workers]
    lines += ["", f"{'RUNNING (oldest first)':34}{'PHASE':18}{'AGE':>8}{'PROMPT':>8}{'OUTPUT':>8}"]
    lines += [
        f"{each.request_id[:32]:34}{each.phase:18}{each.age_s:7.2f}s{each.prompt_tokens:8}{each.output_tokens:8}"
        for each in requests.running[:10]
    ]
    width = shutil.get_terminal_size((120, 40)).columns
    lines += ["", *textwrap.wrap(requests.bound, width)]
    return "\n".join(printable(line)[:width].rstrip() for line in lines)


def _latencies(requests: pb.ListRequestsResponse) -> list[str]:
    answered = [each.timing for each in requests.recent if each.outcome == "ok"]
    counts = Counter(each.outcome for each in requests.recent)
    ended = ", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES if counts[outcome])
    lines = [
        f"{requests.num_running} running, {requests.num_waiting} waiting; of the last {len(requests.recent)}: {ended or 'none'}"
    ]
    for name, values in (
        ("TTFT", [timing.ttft_s for timing in answered]),
        ("TPOT", [timing.tpot_s for timing in answered if timing.tpot_s]),
    ):
        if values:
            cells = "  ".join(f"p{percent} {1e3 * percentile(values, percent):8.1f} ms" for percent in (50, 95, 99))
            lines.append(f"{name}  {cells}")
    return lines


def _model(view: pb.ModelView) -> str:
    cells = f"{view.num_running:5}{view.num_waiting:6}  {view.num_prefill}, {view.num_decode}"
    return f"{view.name:32}{view.state:10}{cells}{f'  {view.reason}' if view.reason else ''}"


def _worker(view: pb.WorkerView, names_model: bool) -> str:
    load = view.load
    blocks = dict(zip(_HOLDERS, load.blocks_by_holder, strict=False))
    total = load.num_blocks_total or 1
    used = sum(blocks.get(holder, 0) for holder in _HOLDERS[:4])
    shares = f"{used / total:4.0%} {blocks.get('cached', 0) / total:4.0%} {blocks.get('free', 0) / total:4.0%}"
    why = view.reason or _breaker(view)
    name, reason = f"{view.role} {view.address}", f"  {why}" if why else ""
    load_cells = f"{load.num_running:5}{load.num_waiting:6}{load.tokens_per_s:8.0f}"
    return f"{name:32}{view.state:10}{load_cells}  {shares:25}{_clock(view)}{f'  {view.model}' if names_model else ''}{reason}"


def _breaker(view: pb.WorkerView) -> str:
    """Describe why requests avoid the worker; empty if they do not."""
    if view.breaker == "open":
        when = f"in {view.breaker_retry_s:.0f} s" if view.breaker_retry_s else "with the next request"
        return f"set aside: it left requests unanswered; asked again {when}"
    return "new: asked for one request first" if view.breaker == "new" else ""


def _clock(view: pb.WorkerView) -> str:
    """Describe how far the worker's clock is ahead of the gateway's, and the error of that estimate."""
    if not view.HasField("clock_offset_s"):
        return "-"
    return f"{1e3 * view.clock_offset_s:+.1f} ± {1e3 * view.clock_error_s:.1f} ms"


def _rates(before, now) -> str:
    if before is None:
        return ""
    seconds, (_, old), (_, new) = now[0] - before[0], before, now
    ended, output = new.num_ended - old.num_ended, new.num_output_tokens - old.num_output_tokens
    return f"{ended / seconds:.1f} requests/s  {output / seconds:.0f} tokens/s"
