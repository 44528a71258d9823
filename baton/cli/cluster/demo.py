"""`make demo`: serve the shipped model with three processes, stream one completion, and show where its time went.

Exit status: 0 done, 1 failed, 2 wrong use."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from baton.cli.launch.placing.keeper import StartError
from baton.cli.launch.placing.ports import PortError
from baton.cli.launch.stack import SHIPPED_MODEL, Stack, StackPlan
from baton.client import AsyncClient, CallError, GenerateOptions, make_request
from baton.service.exits import FAILED, fail
from baton.service.settings import make_parser
from baton.v1 import inference_pb2 as pb

# Long enough for a separate prefill to pay.
PROMPT = '''"""Small helpers for text files."""

import os
import tempfile


class Error(Exception):
    """Base class of the errors of this module."""


def read_lines(path, encoding="utf-8"):
    """Return the lines of a text file as a list, without their line ends."""
    if not os.path.exists(path):
        raise Error("no such file: %r" % path)
    with open(path, encoding=encoding) as file:
        return [line.rstrip("\\n") for line in file]


def write_lines(path, lines, encoding="utf-8"):
    """Write lines to a text file, each with a line end."""'''
# A small model repeats itself under greedy sampling. The seed makes all runs alike.
SAMPLING = GenerateOptions(temperature=0.6, top_p=0.95, repetition_penalty=1.1, seed=1)
MIN_TOKENS = 32  # so that there is something to stream
# The phases between the request's arrival and its first token, in order; they add up to ttft_s.
PHASES = (
    ("tokenize_s", "gateway: text to token ids"),
    ("route_s", "gateway: look up prefixes, choose workers"),
    ("admit_s", "decode worker: grant credit"),
    ("prefill_queue_s", "prefill worker: wait for a step"),
    ("prefill_s", "prefill worker: read the prompt, draw the first token"),
    ("first_delivery_s", "first token: worker, gateway, client's stream"),
)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(
        "python -m baton.cli.cluster.demo", "Serve the shipped model, stream a completion, show its phases."
    )
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL, metavar="DIR", help="(default: the shipped one)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        asyncio.run(_run(args.model, args.prompt, args.max_tokens))
    except (StartError, PortError, DemoError, CallError) as error:
        return fail("demo", error, FAILED)
    except KeyboardInterrupt:
        return 1
    return 0


class DemoError(Exception):
    """The demo did not show what it should."""


async def _run(model: Path, prompt: str, max_tokens: int) -> None:
    quiet = ["--log-level=warning"]
    # Always split, so that the demo shows a handoff.
    workers = {"prefill": quiet, "decode": quiet}
    stack = Stack(StackPlan({None: model}, worker_options=workers, gateway_options=[*quiet, "--split=always"]))
    try:
        print(f"starting a gateway, a prefill worker and a decode worker for {model.name}", flush=True)
        begin = time.monotonic()
        fields = await stack.start()
        print(f"ready after {time.monotonic() - begin:.1f} s", flush=True)
        last = await _stream(fields["grpc"], prompt, max_tokens)
    finally:
        stopped_well = await stack.drain()
    print()
    print("\n".join(table(last)), flush=True)
    if not stopped_well:
        raise DemoError("a process had to be killed")


async def _stream(target: str, prompt: str, max_tokens: int) -> pb.GenerateResponse:
    """Print the text as it streams; return the last message, which has usage and timing."""
    request = make_request(prompt, {"max_tokens": max_tokens, "min_tokens": min(MIN_TOKENS, max_tokens), **SAMPLING})
    print(f"\n{prompt}", end="", flush=True)
    async with AsyncClient(target, timeout_s=120) as client:
        last = None
        async for last in client.send(request):
            print(last.text, end="", flush=True)
    print()
    if last is None or not last.HasField("timing"):
        raise DemoError("the stream ended without timing")
    return last


def table(last: pb.GenerateResponse) -> Iterator[str]:
    """Yield a table of the phases up to the first token, which add up to ttft_s. Raises DemoError if they do not."""
    timing, usage = last.timing, last.usage
    total = sum(getattr(timing, name) for name, _ in PHASES)
    if abs(total - timing.ttft_s) > 1e-6:
        raise DemoError(f"the phases add up to {total:.6f} s, ttft_s is {timing.ttft_s:.6f} s")
    yield f"{'phase':<18}{'ms':>9}{'share':>8}   what happens"
    for name, what in PHASES:
        seconds = getattr(timing, name)
        yield f"{name:<18}{seconds * 1e3:>9.2f}{seconds / timing.ttft_s:>8.1%}   {what}"
    yield f"{'= ttft_s':<18}{timing.ttft_s * 1e3:>9.2f}{1:>8.1%}   time to first token"
    yield ""
    yield (
        f"{usage.prompt_tokens} prompt tokens, {usage.output_tokens} output tokens, "
        f"{timing.tpot_s * 1e3:.2f} ms a token; KV moved in {timing.transfer_s * 1e3:.2f} ms, "
        f"{timing.transfer_hidden_s * 1e3:.2f} ms of it hidden behind the prefill"
    )


if __name__ == "__main__":
    sys.exit(main())
