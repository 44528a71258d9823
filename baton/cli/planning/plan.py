"""`baton plan`: find out which workers a load needs, how many, and on what device, before anything is bought or
started."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from baton.cli.planning.model_flags import FORMS, add_model_flags, lengths_of, name_to_start, read_model, stored_form
from baton.cli.planning.picture_file import PictureError, check_place, write_picture
from baton.loadgen.trace import TraceEntry, TraceError, read_trace
from baton.loadgen.workload import WORKLOADS, Shape
from baton.service.arguments import add_command, positive, whole
from baton.service.exits import FAILED, WRONG_USE, fail
from baton.service.slo import Slo, parse_slo

_NUM_DRAWN = 300  # requests; at 20 a second this is a quarter of a minute, in which queues reach their full length
_EXAMPLES = """
baton plan --model llama-3.1-8b --device H100 --rate 12 --lengths 2000,200 --slo ttft=1s,tpot=30ms --price 2.5
baton plan --model llama-3.1-8b --device L40S --rate 4 --workload chat --slo ttft=500ms,tpot=50ms --picture plan.svg
baton plan --device cpu --rate 2 --lengths 256,64 --slo ttft=1s,tpot=50ms
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "plan",
        summary="say which workers serve a load within an SLO, before they are bought",
        description="Memory to the byte, step times from rooflines and measured efficiencies, queueing by Baton's own scheduler, "
        "admission and routing in virtual time. The answer is the smallest number of prefill and decode workers, how sure that is, "
        "and what starts them. 0 prefill workers: decode workers read prompts themselves.",
        examples=_EXAMPLES,
    )
    add_model_flags(parser)
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--lengths", metavar="PROMPT,OUTPUT", help="mean tokens of a request (default: 256,64)")
    load.add_argument("--workload", choices=WORKLOADS, help="lengths and shared prefixes of a kind of use")
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="recorded requests: Mooncake's .jsonl or Azure's .csv, .gz or not"
    )
    parser.add_argument("--rate", type=positive, metavar="R", help="requests a second (default: the trace's own)")
    parser.add_argument(
        "--num-requests",
        type=whole,
        default=_NUM_DRAWN,
        metavar="N",
        help="requests that are simulated (default: %(default)s)",
    )
    parser.add_argument("--slo", default="ttft=1s,tpot=50ms", help="objective of every request (default: %(default)s)")
    parser.add_argument(
        "--attain",
        type=positive,
        default=0.95,
        metavar="S",
        help="share of requests that must meet it (default: %(default)s)",
    )
    parser.add_argument(
        "--quantization",
        choices=("any", *FORMS),
        default="any",
        help="form to which workers round the weights (default: any); what is quantized already has its own",
    )
    parser.add_argument("--kv-dtype", choices=("any", "auto", "int8"), default="any", help="form of KV (default: any)")
    parser.add_argument(
        "--max-devices", type=whole, default=64, metavar="N", help="look no further (default: %(default)s)"
    )
    parser.add_argument(
        "--price", type=positive, metavar="USD", help="of a device for an hour: the cost of a million output tokens"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write goodput over rate of the best three as SVG")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan; return 0 with an answer, 1 if nothing holds the load or the picture cannot be written, 2 for
    wrong use."""
    try:
        slo = parse_slo(args.slo)
        if args.attain > 1:
            raise ValueError(f"--attain {args.attain:g}: a share, at most 1")
        entries, rate = _load(args)
    except (ValueError, TraceError) as error:
        return fail("baton plan", error, WRONG_USE)
    try:
        check_place(args.picture)
        return _plan(args, entries, rate, slo)
    except PictureError as error:
        return fail("baton plan", error, FAILED)


def _load(args: argparse.Namespace) -> tuple[list[TraceEntry], float]:
    """Return the requests and their rate per second. Raises ValueError, TraceError."""
    if args.trace is None:
        shape = WORKLOADS[args.workload] if args.workload else Shape(*lengths_of(args.lengths or "256,64"))
        if args.rate is None:
            raise ValueError("--rate R is needed without --trace: how many requests come a second")
        from baton.planning.workload import drawn_entries

        return drawn_entries(args.rate, shape, args.num_requests), args.rate
    entries = read_trace(args.trace)[: args.num_requests]
    if len(entries) < 2 or not entries[-1].at_s:
        raise ValueError(f"--trace {args.trace}: fewer than two requests that come one after the other")
    own = len(entries) / entries[-1].at_s
    return entries, args.rate or own


def _plan(args: argparse.Namespace, entries: list[TraceEntry], rate: float, slo: Slo) -> int:
    """Search for the smallest stack and print it; return the exit status. The imports need torch, so they come after
    wrong use has been reported. Raises PictureError."""
    from baton.engine.core.model_errors import ModelError
    from baton.planning import search
    from baton.planning.answer import PlanReport, curves_of
    from baton.planning.picture import goodput_picture
    from baton.planning.workload import at_rate, fitting

    try:
        spec, device, efficiencies = read_model(args)
        if device.cores is not None and device.threads > device.cores:
            raise ValueError(f"--threads {args.threads}: this machine has {device.cores} cores")
        num_all, entries = len(entries), fitting(entries, spec.longest_context)
        if num_longer := num_all - len(entries):
            what = f"longer than the model's context of {spec.longest_context} tokens: left out"
            print(f"{num_longer} of {num_all} requests are {what}", file=sys.stderr)
        if args.trace is not None or num_longer:
            rate = args.rate or rate * len(entries) / num_all
            entries = at_rate(entries, rate)
        stored = stored_form(args, spec, device)
        forms = search.WANTED_FORMS if args.quantization == "any" else (args.quantization,)
        forms = forms if stored is None else (stored,)
        kv_forms = ("auto", "int8") if args.kv_dtype == "any" else (args.kv_dtype,)
        ask = search.Ask(entries, rate, slo, args.attain, forms, kv_forms, args.max_devices, stored is not None)
    except (ModelError, ValueError) as error:
        return fail("baton plan", error, WRONG_USE)
    prompt, output = (
        statistics.mean(getattr(entry, what) for entry in entries) for what in ("num_prompt", "num_output")
    )
    print(f"{len(entries)} requests of {prompt:.0f} + {output:.0f} tokens at {rate:g}/s", file=sys.stderr)
    say = _progress if sys.stderr.isatty() else lambda words: None
    try:
        choices = search.find(spec, device, efficiencies, ask, say)
    except search.NoPlan as error:
        return fail("baton plan", error, FAILED)
    say("")
    confidence = search.confidence(efficiencies, device)
    report = PlanReport(choices, ask, device, confidence, args.price, name_to_start(args))
    print(report.as_json() if args.json else report.as_text())
    if args.picture is not None:
        title = f"{spec.name} on {device.name}, {slo}: {confidence}"
        write_picture(args.picture, goodput_picture(title, curves_of(choices), rate))
    return 0


def _progress(words: str) -> None:
    print(f"\r\x1b[K{words}", end="", file=sys.stderr, flush=True)
