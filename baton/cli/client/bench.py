"""`baton bench`: put a reproducible load on a running gateway, and report what limits it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import math
import os
import platform
import random
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from baton.cli.client.bench_progress import progress
from baton.engine.core import cpu
from baton.loadgen import report, workload
from baton.loadgen.client import model_info
from baton.loadgen.compare import RecordedRun, compared, compared_page, read_run
from baton.loadgen.openai import VOCAB_SIZE, openai_info
from baton.loadgen.plan import OpenAIServer, RunPlan, Unreachable
from baton.loadgen.run import Ran, SenderDied, run_jobs
from baton.loadgen.summary import summarize, table
from baton.loadgen.trace import TraceError, read_trace
from baton.loadgen.workload import WORKLOADS, Job, Shape
from baton.service.arguments import add_command, host_port_list, positive, whole
from baton.service.exits import FAILED, WRONG_USE, fail
from baton.service.observe.bottleneck import Bottleneck, aware_of_host
from baton.service.observe.cpu_usage import CpuUsage
from baton.service.security.access import add_access_flags, read_access
from baton.service.security.exposure import is_loopback
from baton.service.settings import SettingsError, installed_version
from baton.service.slo import Slo, parse_slo

DEFAULT_TARGET = "127.0.0.1:50051"
_WARM_UP = 4
_MET_SHARE = 0.99  # a rate is sustained if this share of its requests meets the SLO
_NUM_REQUESTS = 200  # by default
# requests/s to start at; most steps; ratio of the bounds at which the search ends
_SWEEP_FROM, _SWEEP_STEPS, _SWEEP_RESOLUTION = 1.0, 16, 1.1
_SWEEP_STEP_S, _LEAST_REQUESTS = 20.0, 20  # a step at a low rate is shorter, but sends at least this many requests
_DEFAULTS = {"arrivals": "poisson", "rate_scale": 1.0, "length_scale": 1.0, "workload": "short"}
_IDLE_BESIDE = {"trace": ("arrivals", "workload", "prompt_tokens", "output_tokens"), "closed": ("arrivals",)}


_EXAMPLES = """
baton bench --workload chat --rate 4
baton bench --closed 16 --num-requests 200 --out before
baton bench --sweep --slo ttft=500ms,tpot=50ms
baton bench --compare before after
baton bench --openai http://127.0.0.1:8000/v1 --closed 16
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "bench",
        summary="measure a running gateway, or any server of OpenAI's API, under load",
        usage="baton bench [--rate R | --closed N | --trace FILE | --sweep | --compare A B] [--slo S] [--out DIR] ...",
        description="Sends requests by rate, by trace, or N at a time; writes summary.json, requests.csv, report.html.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "--target",
        type=host_port_list,
        default=DEFAULT_TARGET,
        metavar="HOST:PORT",
        help="gateway (default: %(default)s)",
    )
    parser.add_argument(
        "--openai",
        metavar="URL",
        help="any server of OpenAI's API instead, for instance http://127.0.0.1:8000/v1; prompts are words there",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="of several that are served (default: the only one; of --openai the first)"
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=positive, metavar="R", help="requests a second, open loop (default: 4)")
    load.add_argument("--closed", type=whole, metavar="N", help="N requests at a time, closed loop")
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay a Mooncake .jsonl or an Azure .csv, .gz or not"
    )
    load.add_argument("--sweep", action="store_true", help="raise the rate until the SLO is missed (needs --slo)")
    load.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="two --out folders side by side, with intervals; --out writes a page",
    )
    parser.add_argument(
        "--arrivals", choices=("poisson", "constant", "burst"), help="of --rate and --sweep (default: poisson)"
    )
    parser.add_argument("--rate-scale", type=positive, metavar="X", help="replay the trace X times as fast")
    parser.add_argument("--length-scale", type=positive, metavar="X", help="lengths of the trace times X")
    parser.add_argument("--num-requests", type=whole, metavar="N", help="requests (default: 200; of a trace: all)")
    parser.add_argument("--workload", choices=WORKLOADS, help=f"shape of requests (default: short): {_shapes()}")
    parser.add_argument("--prompt-tokens", type=whole, metavar="N", help="mean (default: the workload's)")
    parser.add_argument("--output-tokens", type=whole, metavar="N", help="mean (default: the workload's)")
    parser.add_argument("--slo", type=_slo, default=Slo(), metavar="S", help="for instance ttft=300ms,tpot=50ms")
    parser.add_argument("--processes", type=whole, default=1, metavar="N", help="that send (default: 1)")
    parser.add_argument("--timeout", type=positive, default=120.0, metavar="S", help="of one request (default: 120)")
    parser.add_argument(
        "--seed", type=int, help="of lengths, arrivals and prompts (default: drawn, so that nothing is cached)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; made, never overwritten")
    add_access_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; return 0 for a valid run, 1 if the gateway is not reached or the run is not valid, 2 for wrong
    use."""
    try:
        if args.compare:
            first, second = map(read_run, args.compare)
            return _compare(first, second, args.out)
        _check(args)
        entries = read_trace(args.trace) if args.trace else None
        with contextlib.ExitStack() as at_end, _results(args.out) as folder:
            bench = _Bench(args, asyncio.run(_served(args)))
            summary, ran, steps = bench.sweep() if args.sweep else bench.once(entries)
            at_end.callback(lambda: print(screen(summary)))  # whether or not the files can be written, or anybody reads
            if folder:
                _write(folder, summary, ran, steps)
    except (ValueError, TraceError, SettingsError) as error:
        return fail("baton bench", error, WRONG_USE)
    except (Unreachable, SenderDied) as error:
        return fail("baton bench", error, FAILED)
    except BrokenPipeError:  # of `baton bench | head`: the command itself ends it
        raise
    except OSError as error:
        return fail("baton bench", f"--out {args.out}: {error.strerror}", FAILED)
    except KeyboardInterrupt:
        return fail("baton bench", "interrupted; nothing was written", FAILED)
    if args.out:
        print(f"{args.out / 'report.html'}")
    return 0 if summary["valid"] and summary["num_answered"] else 1


def _check(args: argparse.Namespace) -> None:
    """Fill in defaults. Raises ValueError for options that exclude each other."""
    if args.sweep and args.slo == Slo():
        raise ValueError("--sweep needs --slo: without one no rate is too high")
    for load, names in _IDLE_BESIDE.items():
        for name in names if getattr(args, load) else ():
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} has no effect beside --{load}")
    for name, default in _DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif name.endswith("_scale") and not args.trace:
            raise ValueError(f"--{name.replace('_', '-')} has no effect without --trace")
    shared = WORKLOADS[args.workload].shared
    if args.prompt_tokens is not None and args.prompt_tokens <= shared:
        what = f"the first {shared:,} of a prompt of --workload {args.workload} are the same in all; give more"
        raise ValueError(f"--prompt-tokens {args.prompt_tokens}: {what}")


@contextlib.contextmanager
def _results(out: Path | None) -> Iterator[Path | None]:
    """Yield a temporary folder that is renamed to `out` at the end, and removed after an error. It is made before the
    run, so that a folder that cannot be written fails without one. Raises ValueError, OSError."""
    if out is None:
        yield None
        return
    if out.exists():
        raise ValueError(f"--out {out} exists; choose another folder")
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _Served(NamedTuple):
    """The measured server in words, and the limits of its requests."""

    target: str
    model: str
    vocab_size: int
    context: int
    is_here: bool  # the server runs on this host
    openai: OpenAIServer | None = None


async def _served(args: argparse.Namespace) -> _Served:
    """Ask the server for its model and limits. Raises Unreachable."""
    access = read_access(args)
    if args.openai:
        info = await openai_info(args.openai, args.model, access)
        here = is_loopback(f"{urlsplit(args.openai).hostname}:80")
        return _Served(args.openai, info.server.model, VOCAB_SIZE, info.context or sys.maxsize, here, info.server)
    info = await model_info(args.target, access, args.model or "")
    model = f"{info.name}, {info.dtype}, quantization {info.quantization}, kv {info.kv_dtype}"
    return _Served(
        args.target, model, info.vocab_size, info.context, all(is_loopback(target) for target in args.target.split(","))
    )


class _Bench:
    """The runs of one command."""

    def __init__(self, args: argparse.Namespace, served: _Served):
        self._args, self._served = args, served
        self._seed = secrets.randbits(31) if args.seed is None else args.seed
        self._plan = RunPlan(
            args.target,
            served.vocab_size,
            args.closed,
            args.processes,
            timeout_s=args.timeout,
            seed=self._seed,
            access=read_access(args),
            model=args.model or "",
            openai=served.openai,
        )
        self._warmed = False
        named = WORKLOADS[args.workload]
        self._shape = Shape(args.prompt_tokens or named.prompt, args.output_tokens or named.output, named.shared)

    def once(self, entries) -> tuple[dict, Ran, list[dict]]:
        args = self._args
        if entries is not None:
            jobs = workload.from_trace(entries, args.rate_scale, args.length_scale, args.num_requests)
            name = f"trace {args.trace.name}, rate x {args.rate_scale:g}, lengths x {args.length_scale:g}"
        elif args.closed:
            jobs, name = self._drawn(None), f"{args.workload}, closed loop of {args.closed}"
        else:
            rate = args.rate or 4.0
            jobs, name = self._drawn(rate), f"{args.workload}, {args.arrivals} arrivals, {rate:g} requests/s"
        summary, ran = self._measure(jobs, name)
        return summary, ran, []

    def sweep(self) -> tuple[dict, Ran, list[dict]]:
        """Double the rate until the SLO is missed, then bisect; the highest rate that meets it is the run. A step that
        is not valid bounds the search but does not count as a miss, so a sweep that such a step ends has not found the
        rate."""
        steps, tried, best, within, beyond, unfinished = [], [], None, 0.0, math.inf, ""
        while len(steps) < _SWEEP_STEPS and beyond > _SWEEP_RESOLUTION * within:
            rate = 2 * within or _SWEEP_FROM if beyond == math.inf else (within + beyond) / 2
            summary, ran = self._step(rate, len(steps))
            steps.append({**summary, "rate": rate})
            tried.append((summary, ran))
            if ran.is_interrupted:
                unfinished = f"it was interrupted at {rate:.3g}/s"
                break
            if summary["valid"] and (summary["slo_met_share"] or 0.0) >= _MET_SHARE:
                best, within = (summary, ran), rate
                continue
            beyond, unfinished = rate, "" if summary["valid"] else f"at {rate:.3g}/s {report.late(summary)}"
            if not within:
                break
        summary, ran = best or tried[-1]
        summary["highest_rate_within_slo"] = within or None
        missed = [step["rate"] for step in steps if step["valid"] and step["rate"] > within]
        summary["lowest_rate_beyond_slo"] = min(missed, default=None)
        summary["unfinished"], summary["valid"] = unfinished, summary["valid"] and not unfinished
        return summary, ran, sorted(steps, key=lambda step: step["rate"])

    def _step(self, rate: float, number: int) -> tuple[dict, Ran]:
        """Run one step of a sweep with its own prompts, since the cache would hold those of the previous step."""
        self._plan = replace(self._plan, seed=self._seed + 2 + number)
        num = min(self._args.num_requests or _NUM_REQUESTS, max(_LEAST_REQUESTS, round(_SWEEP_STEP_S * rate)))
        return self._measure(
            self._drawn(rate, num),
            f"{self._args.workload}, sweep, {self._args.arrivals} arrivals, {rate:.3g} requests/s",
        )

    def _drawn(self, rate: float | None, num: int | None = None) -> list[Job]:
        args = self._args
        rng = random.Random(self._seed)
        times = workload.arrivals(args.arrivals, rate, rng) if rate else iter(lambda: 0.0, None)
        num_jobs: int = num or args.num_requests or _NUM_REQUESTS
        return workload.drawn(rng, times, num_jobs, self._shape)

    def _measure(self, jobs: Sequence[Job], name: str) -> tuple[dict, Ran]:
        jobs, num_cut = workload.fitted(jobs, self._served.context)
        if not self._warmed:
            self._warm_up(jobs)
        cpu_usage = CpuUsage()
        with progress(len(jobs)) as on_end:
            ran = run_jobs(self._plan, jobs, on_end)
        busy = cpu_usage.busy() if self._served.is_here else 0.0  # otherwise the cores here say nothing about the stack
        if ran.is_interrupted and not ran.outcomes:
            raise KeyboardInterrupt
        summary = summarize(ran, self._args.slo, is_open=self._plan.concurrency is None)
        summary["bound"] = aware_of_host(Bottleneck(**summary["bound"]), cpu_usage.num_cores, busy)._asdict()
        facts = {
            "workload": name,
            "target": self._served.target,
            "model": self._served.model,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "shape": _shape_of(jobs),
            "host": f"{len(os.sched_getaffinity(0))} cores of {cpu.name()}",
            "versions": f"baton {installed_version()}, Python {platform.python_version()}",
            "num_cut_to_context": num_cut,
            "seed": self._seed,
        }
        return {**facts, **summary}, ran

    def _warm_up(self, jobs: Sequence[Job]) -> None:
        """Run a few requests that pay for imports, compilation and connections. Their seed is unique, so they share no
        prompt with the measured requests."""
        self._warmed = True
        plan = replace(self._plan, concurrency=_WARM_UP, num_processes=1, seed=self._seed + 1)
        if run_jobs(plan, jobs[:_WARM_UP]).is_interrupted:
            raise KeyboardInterrupt


def screen(summary: dict) -> str:
    """Return the lines for the terminal."""
    lines = [summary["workload"]]
    for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("end to end", "e2e_s")):
        figures = summary[key]
        cells = (f"{point} {1e3 * figures[point]:.1f}" for point in ("p50", "p95", "p99") if figures[point] is not None)
        lines.append(f"  {name:11} {'  '.join(cells)} ms")
    lines.append(
        f"  {summary['num_answered']} of {summary['num_requests']} answered, {summary['requests_per_s']:.2f} requests/s, "
        f"{summary['output_tokens_per_s']:.0f} output tokens/s, {summary['cached_share'] or 0:.0%} cached"
    )
    if summary["slo"]:
        lines.append(
            f"  goodput {summary['goodput_per_s']:.2f}/s: {summary['slo_met_share'] or 0:.1%} within {summary['slo']}"
        )
    if "highest_rate_within_slo" in summary:
        lines.append(f"  highest rate within the SLO: {_highest_rate(summary)}")
    if set(summary["statuses"]) - {"OK"}:
        lines.append("  " + ", ".join(f"{status} {num}" for status, num in summary["statuses"].items()))
    return "\n".join([*lines, report.verdict(summary)])


def _highest_rate(summary: dict) -> str:
    rate, beyond = summary["highest_rate_within_slo"], summary["lowest_rate_beyond_slo"]
    if rate is None:
        found = "not known" if summary["unfinished"] else "none"
    else:
        found = f"{'at least ' if summary['unfinished'] else ''}{rate:.3g}/s"
    return found if beyond is None else f"{found}; {beyond:.3g}/s was not"


def _compare(a: RecordedRun, b: RecordedRun, out: Path | None) -> int:
    with _results(out) as folder:
        if folder:
            (folder / "compare.html").write_text(compared_page(a, b))
    print(compared(a, b))
    if out:
        print(f"{out / 'compare.html'}")
    return 0


def _write(folder: Path, summary: dict, ran: Ran, steps: list[dict]) -> None:
    (folder / "summary.json").write_text(json.dumps({**summary, "sweep": steps}, indent=1) + "\n")
    (folder / "requests.csv").write_text(table(ran.outcomes))
    (folder / "report.html").write_text(report.page(summary, ran.outcomes, steps))


def _shapes() -> str:
    return "; ".join(
        f"{name} {shape.prompt} to {shape.output} tokens" + (f", {shape.shared} shared by all" if shape.shared else "")
        for name, shape in WORKLOADS.items()
    )


def _shape_of(jobs: Sequence[Job]) -> str:
    """Return the mean lengths of the requests that were sent, in words."""
    if not jobs:
        return "no requests"
    prompt, output = (
        sum(values) / len(jobs) for values in zip(*((j.num_prompt, j.num_output) for j in jobs), strict=True)
    )
    return f"{len(jobs)} requests of {prompt:.0f} prompt and {output:.0f} output tokens (means)"


def _slo(text: str) -> Slo:
    try:
        return parse_slo(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
