"""`baton scaler`: decide each minute how many workers a running fleet should have; print the changes, or carry them
out."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import secrets
import socket
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from baton.addresses import split_address
from baton.cli.launch.choice import add_launcher_flags, make_launcher
from baton.cli.launch.placing.launcher import LaunchError
from baton.cli.planning.model_flags import FORMS, add_model_flags, read_model, stored_form
from baton.cli.planning.performer import FleetPerformer
from baton.cli.planning.picture_file import PictureError, check_place, write_picture
from baton.engine.core.model_errors import ModelError
from baton.loadgen.trace import TraceError, read_trace
from baton.protocol import ROLES
from baton.service.arguments import add_command, host_port, positive, whole
from baton.service.exits import FAILED, WRONG_USE, fail
from baton.service.net.client import explain_failure, open_channel
from baton.service.net.server import run as run_process
from baton.service.net.server import until_stopped
from baton.service.security.access import Access, add_access_flags, read_access
from baton.service.settings import SettingsError
from baton.service.slo import parse_slo
from baton.v1 import fleet_pb2, fleet_pb2_grpc

if TYPE_CHECKING:
    from baton.planning.scaling.day import DayResult, LoadMinute
    from baton.planning.scaling.live import GatewayLook
    from baton.planning.scaling.load_model import StepModel
    from baton.planning.scaling.scaler import Scaler, ScalerBounds
    from baton.planning.step_time import StepTimes

    TimesIn = Callable[[str, str], StepTimes]  # dtype, form of KV

_LOOK_S = 5.0  # the limit of each call
_EXAMPLES = """
baton scaler --target gateway-0:50071 --target gateway-1:50071 --model DIR --device H100 --slo ttft=1s,tpot=30ms
baton scaler --target 127.0.0.1:50051 --apply --launcher 127.0.0.1:50050 --decode 1-4
baton scaler --dry-run --model llama-3.1-8b --device H100 --load 200,2000,200 --picture day.svg
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "scaler",
        summary="say each minute how many workers a running fleet should have",
        description="Decide once a minute, by the model of `baton plan` held against the gateways' counters. Changes are told, "
        "and carried out with --apply.",
        examples=_EXAMPLES,
        usage="baton scaler --target HOST:PORT [--target ...] [OPTIONS], or baton scaler --dry-run [OPTIONS]",
    )
    add_model_flags(parser)
    parser.add_argument(
        "--quantization",
        choices=FORMS,
        help="form to which workers round the weights (default: they are as in the files)",
    )
    parser.add_argument("--max-num-seqs", type=whole, default=64, metavar="N", help="of a decode worker (default: 64)")
    parser.add_argument("--slo", default="ttft=1s,tpot=50ms", help="objective (default: %(default)s)")
    parser.add_argument(
        "--target",
        action="append",
        type=host_port,
        metavar="HOST:PORT",
        help="each gateway's fleet port, or a name that has all",
    )
    for role in ROLES:
        parser.add_argument(f"--{role}", default="1-64", metavar="MIN-MAX", help=f"{role} workers (default: 1-64)")
    parser.add_argument(
        "--start-s", type=positive, default=90.0, metavar="S", help="until a new worker serves (default: 90)"
    )
    parser.add_argument("--apply", action="store_true", help="carry changes out; with --launcher starts too")
    parser.add_argument("--redis", metavar="URL", help="of several scalers one leads, by a lease there")
    dry = parser.add_argument_group("a dry run")
    dry.add_argument("--dry-run", action="store_true", help="decide over a day of load, beside an oracle")
    dry.add_argument("--trace", type=Path, metavar="FILE", help="recorded requests in place of a generated day")
    dry.add_argument("--seed", type=int, default=0, metavar="N", help="of the generated day (default: 0)")
    dry.add_argument(
        "--load",
        default="100,1000,200",
        metavar="R,P,O",
        help="its most requests a second, mean tokens of prompt and output (default: %(default)s)",
    )
    dry.add_argument("--picture", type=Path, metavar="FILE", help="write workers over the day as SVG")
    add_launcher_flags(parser, "none")
    add_access_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the scaler; return 0 at the end of a dry run or after a signal, 1 if a launcher or the picture fails, 2 for
    wrong use."""
    try:
        _check(args)
        access, day = read_access(args), _day(args) if args.dry_run else []
        model, times_in, scaler, bounds = _scaler(args)
    except (SettingsError, ModelError, ValueError, TraceError, OSError) as error:
        return fail("baton scaler", error, WRONG_USE)
    try:
        if args.dry_run:
            check_place(args.picture)
            _dry_run(args, day, model, scaler, bounds)
        else:
            # Install a handler: the kernel withholds SIGTERM from a pod's first process if it has none.
            run_process(lambda stop: until_stopped(_serve(args, access, model, times_in, scaler), stop))
    except KeyboardInterrupt:
        pass
    except ValueError as error:  # of --redis, or of flags beside --launcher
        return fail("baton scaler", error, WRONG_USE)
    except (LaunchError, PictureError) as error:
        return fail("baton scaler", error, FAILED)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Check that the flags go together. Raises ValueError."""
    if args.dry_run and (args.target or args.apply):
        raise ValueError("--dry-run asks no gateway: leave --target and --apply out")
    if args.launcher and not args.apply:
        raise ValueError("--launcher has no effect without --apply")
    if not args.dry_run and not args.target:
        raise ValueError("--target HOST:PORT is needed: a gateway's fleet port; or --dry-run")
    if not args.dry_run and (args.trace or args.picture):
        raise ValueError("--trace and --picture are for --dry-run")


def _range(role: str, text: str) -> tuple[int, int]:
    try:
        least, most = (int(part) for part in text.split("-"))
    except ValueError:
        raise ValueError(f"--{role} {text}: MIN-MAX, as 1-64") from None
    return least, most


def _scaler(args: argparse.Namespace) -> tuple[StepModel, TimesIn, Scaler, ScalerBounds]:
    """Return the step model in the dtype of the model's folder, which workers use unless they say otherwise; its step
    times in other dtypes; the scaler and its bounds. Raises ModelError, ValueError."""
    from baton.planning.scaling.load_model import StepModel
    from baton.planning.scaling.scaler import Scaler, ScalerBounds
    from baton.planning.step_time import StepTimes

    slo = parse_slo(args.slo)
    ranges = {role: _range(role, getattr(args, role)) for role in ROLES}
    most = {role: range_[1] for role, range_ in ranges.items()}
    bounds = ScalerBounds({role: range_[0] for role, range_ in ranges.items()}, most, sum(most.values()))
    spec, device, efficiencies = read_model(args)

    @cache
    def times_in(dtype: str, kv_form: str) -> StepTimes:
        form = stored_form(args, spec, device, dtype) or args.quantization or "none"
        form = "fp32" if (form, dtype) == ("none", "fp32") else form
        return StepTimes(spec, device, efficiencies, form, kv_form, dtype=dtype)

    times = times_in(spec.dtype, spec.dtype)
    model = StepModel(times, slo, args.max_num_seqs, 512 if device.kind == "cpu" else 8192)
    return model, times_in, Scaler(model, bounds, slo, args.start_s), bounds


# ---- a day of load ----


def _day(args: argparse.Namespace) -> list[LoadMinute]:
    """Return the load of each minute of the day. Raises ValueError, TraceError."""
    from baton.planning.scaling.day import generated_day, minutes_of

    if args.trace is not None:
        return minutes_of(read_trace(args.trace))
    try:
        rate, prompt, output = (float(part) for part in args.load.split(","))
    except ValueError:
        rate = prompt = output = 0.0
    if not all(0 < number < math.inf for number in (rate, prompt, output)):
        wanted = "three numbers, requests a second, prompt and output tokens, as 200,2000,200"
        raise ValueError(f"--load {args.load}: {wanted}")
    return generated_day(args.seed, rate, prompt, output)


def _dry_run(
    args: argparse.Namespace, day: list[LoadMinute], model: StepModel, scaler: Scaler, bounds: ScalerBounds
) -> None:
    """Decide over the day, and print the result. Raises PictureError."""
    from baton.planning.picture import day_picture
    from baton.planning.scaling.day import run_day

    found = run_day(day, model, scaler, bounds, args.start_s)
    print(_table(found))
    if args.picture is not None:
        drawn = day_picture("Workers over the day, and the least that hold it", found.workers, found.needed)
        write_picture(args.picture, drawn)


def _table(found: DayResult) -> str:
    lines = [f"{'hour':>4}" + "".join(f"{role + what:>18}" for role in ROLES for what in ("", ", least"))]
    for minute in range(0, len(found.workers["decode"]), 60):
        columns = (each[role][minute] for role in ROLES for each in (found.workers, found.needed))
        lines.append(f"{minute // 60:>4}" + "".join(f"{number:>18}" for number in columns))
    ratio = found.hours / found.oracle_hours
    lines.append(
        f"{found.hours:.1f} worker-hours, {ratio:.3f} of the {found.oracle_hours:.1f} of an oracle; {found.missed:.3%} of requests found "
        f"too few workers; {found.num_changes} changes, {found.num_turns} of them back within 15 minutes"
    )
    return "\n".join(lines)


# ---- a running fleet ----


async def _serve(args: argparse.Namespace, access: Access, model: StepModel, times_in: TimesIn, scaler: Scaler) -> None:
    from baton.planning.scaling.lease import LeaderLease
    from baton.planning.scaling.live import FleetWatch, device_of, dtypes_of
    from baton.planning.scaling.loop import ScalerLoop

    # Two containers may have the same host name and process id.
    owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    try:
        lease = None if args.redis is None else LeaderLease(args.redis, owner)
    except ValueError as error:
        raise ValueError(f"--redis: {error}") from None
    launcher = None if args.launcher is None else make_launcher(args, access)
    performer = FleetPerformer(access, launcher) if args.apply else None

    async def look() -> dict[str, GatewayLook | None]:
        targets = sorted({address for target in args.target for address in await _addresses(target)})
        found = await asyncio.gather(*(_look(target, access) for target in targets))
        if why := _unlike(device_of(filter(None, found)), model):
            print(f"baton scaler: nothing is decided: {why}", file=sys.stderr, flush=True)
            return {}
        if (dtypes := dtypes_of(filter(None, found))) is not None:
            model.times = await _times(times_in, dtypes) or model.times
        return dict(zip(targets, found, strict=True))

    print("deciding once a minute; the first look is to compare with", flush=True)
    await ScalerLoop(scaler, FleetWatch(model), look, lambda line: print(line, flush=True), performer, lease).run()


def _unlike(device: str, model: StepModel) -> str:
    """Return why the model does not describe steps on the workers' `device`; "" if it may, as without a device name."""
    from baton.engine.core.device import names_gpu

    planned = model.times.device
    if not device or names_gpu(device) == (planned.kind == "cuda"):
        return ""
    return f"workers compute on {device}, and --device is {'cpu' if planned.kind == 'cpu' else planned.name}"


async def _times(times_in: TimesIn, dtypes: tuple[str, str]) -> StepTimes | None:
    """Return the step times in (dtype, form of KV), computed in a thread, since they may read the model's files. If
    that fails, print a line and return None."""
    try:
        return await asyncio.to_thread(times_in, *dtypes)
    except (ModelError, ValueError, OSError) as error:
        print(f"baton scaler: steps stay those of before: {error}", file=sys.stderr, flush=True)
        return None


async def _addresses(target: str) -> list[str]:
    """Return HOST:PORT of each gateway that a name resolves to, as for a headless Service. If it does not resolve,
    return the name itself, and the call to it reports the error."""
    from gateway.discovery import dns

    host, port = split_address(target)
    try:
        async with asyncio.timeout(_LOOK_S):
            return await dns.addresses_of(host, str(port))
    except OSError:
        return [target]


async def _look(target: str, access: Access) -> GatewayLook | None:
    """Return what a gateway reports. If it does not answer, print a line and return None."""
    from baton.planning.scaling.live import GatewayLook

    try:
        async with open_channel(target, access) as channel:
            stub = fleet_pb2_grpc.FleetStub(channel)
            return GatewayLook(
                await stub.ListWorkers(fleet_pb2.ListWorkersRequest(), timeout=_LOOK_S),
                await stub.ListRequests(fleet_pb2.ListRequestsRequest(), timeout=_LOOK_S),
            )
    except grpc.aio.AioRpcError as error:
        message = await asyncio.to_thread(explain_failure, target, error.code(), error.details(), access)
    except OSError as error:  # of certificates, for instance while they are replaced
        message = f"{target}: {error}"
    print(f"baton scaler: {message}", file=sys.stderr, flush=True)
    return None
