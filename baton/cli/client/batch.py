"""`baton batch`: send the requests of a file to a running gateway and write their results to another file, in order."""

from __future__ import annotations

import argparse
import asyncio
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from tqdm import tqdm

from baton.cli.client.asking import add_target_flags, explain
from baton.cli.client.batch_lines import Json, LineRunner, NotServed, custom_id_of
from baton.cli.client.batch_results import ResultsFile
from baton.client import AsyncClient, CallError, RetryPolicy
from baton.service.arguments import add_command, positive, whole
from baton.service.exits import FAILED, WRONG_USE, fail
from baton.service.security.access import Access, read_access
from baton.service.settings import SettingsError

# A refused line is retried after the pause that the gateway asks for, without limit. A line that gets no answer ends
# the run after a minute.
_RETRY = RetryPolicy(max_attempts=40, longest_pause_s=2.0, counts_refusals=False)
_AHEAD = 4  # times the concurrency: how many results may wait for an earlier one to be written


_EXAMPLES = """
baton batch requests.jsonl
baton batch requests.jsonl --output results.jsonl --concurrency 64
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "batch",
        summary="send the requests of a file and write their results to another",
        description="FILE has a request in OpenAI's batch form on each line (custom_id, method, url, body). Results are "
        "written in the same order. Run it again after an interruption: what has a result is not sent again.",
        examples=_EXAMPLES,
    )
    parser.add_argument("file", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--output", type=Path, metavar="FILE", help="(default: FILE.results.jsonl beside it)")
    parser.add_argument("--concurrency", type=whole, default=16, metavar="N", help="at once (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=positive, default=3600.0, metavar="S", help="of one request (default: %(default)s)"
    )
    add_target_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Send the requests; return 0 if all lines have a result, 1 if interrupted or no gateway is reached, 2 for wrong
    use."""
    try:
        if not stat.S_ISREG(args.file.stat().st_mode):
            raise ValueError(f"{args.file} is no regular file: its lines are read twice")
        output = args.output or args.file.with_name(f"{args.file.name.removesuffix('.jsonl')}.results.jsonl")
        if output.exists() and output.samefile(args.file):
            raise ValueError(f"--output {output} is the input")
        access = read_access(args)
        with ResultsFile(output) as results:
            num_lines, num_done = _compare(args.file, results)
            return _continue(args, access, results, num_lines, num_done)
    except (ValueError, SettingsError) as error:
        return fail("baton batch", error, WRONG_USE)
    except BrokenPipeError:  # of `baton batch | true`: the command itself ends it
        raise
    except OSError as error:
        return fail("baton batch", f"{error.filename}: {error.strerror}", WRONG_USE)


def _continue(args: argparse.Namespace, access: Access, results: ResultsFile, num_lines: int, num_done: int) -> int:
    """Send the lines that have no result yet, and return the exit status."""
    try:
        with _progress(num_lines, num_done) as bar:

            def write(result: Json) -> None:
                results.add(result)
                bar.update()

            asyncio.run(_send(args, access, num_done, results.cut, write))
    except CallError as error:
        return fail("baton batch", explain(error, args.target, access), FAILED)
    except NotServed as error:
        left = num_lines - num_done - results.num_added
        return fail("baton batch", f"{args.target}: {error}; {left} lines are left: run it again to continue", FAILED)
    except KeyboardInterrupt:
        return fail("baton batch", f"interrupted; run it again to continue {results.path}", FAILED)
    except ValueError as error:
        return fail("baton batch", f"--target {error}", WRONG_USE)
    except OSError as error:
        return fail("baton batch", f"{error.filename or results.path}: {error.strerror}", FAILED)
    if num_done and not results.num_added:
        print(f"{results.path}: nothing to do, all {num_done} results were there already")
        return 0
    already = f", {num_done} were there already" if num_done else ""
    print(f"{results.path}: {results.num_added} results, {results.num_failed} of them failures{already}")
    return 0


async def _send(
    args: argparse.Namespace,
    access: Access,
    num_done: int,
    on_answer: Callable[[], None],
    write: Callable[[Json], None],
) -> None:
    """Send all lines after the first `num_done` and write their results in order. Call `on_answer()` once a gateway has
    answered. Raises CallError if none answers at the start, NotServed if none serves later."""
    connection, num_addresses = access.for_client(), args.target.count(",") + 1
    each_once, timeout_s = RetryPolicy(max_attempts=num_addresses), 5 * num_addresses
    async with AsyncClient(args.target, timeout_s=timeout_s, retry=each_once, **connection) as client:
        await client.list_models()  # checks that the gateway answers and accepts the caller
    on_answer()
    async with AsyncClient(args.target, timeout_s=args.timeout, retry=_RETRY, **connection) as client:
        runner, slots = LineRunner(client), asyncio.Semaphore(args.concurrency)
        waiting: deque[asyncio.Task[Json]] = deque()

        async def ask(number: int, line: str) -> Json:
            async with slots:
                return await runner.result(number, line)

        try:
            for number, line in enumerate(_lines(args.file), 1):
                if number <= num_done:
                    continue
                waiting.append(asyncio.create_task(ask(number, line)))
                while len(waiting) >= _AHEAD * args.concurrency:
                    write(await waiting[0])
                    waiting.popleft()
            while waiting:
                write(await waiting[0])
                waiting.popleft()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


def _compare(file: Path, output: ResultsFile) -> tuple[int, int]:
    """Return the number of lines and how many of them have a result. Raises ValueError if two requests have one name or
    the results belong to other requests, OSError."""
    results, numbers = output.read(), dict[str, int]()
    num_lines = num_done = 0
    for num_lines, line in enumerate(_lines(file), 1):
        custom_id = custom_id_of(line)
        if custom_id is not None and (first := numbers.setdefault(custom_id, num_lines)) != num_lines:
            raise ValueError(
                f"{file}: requests {first} and {num_lines} have the custom_id {custom_id!r}: give each its own"
            )
        result = next(results, None)
        if result is not None:
            num_done += 1
            if result.get("custom_id") != custom_id:
                raise ValueError(
                    f"{output.path}: result {num_done} is of {result.get('custom_id')!r}, request {num_lines} is "
                    f"{custom_id!r}: choose another --output"
                )
    if next(results, None) is not None:
        raise ValueError(f"{output.path} has more results than {file} has requests: choose another --output")
    return num_lines, num_done


def _lines(file: Path) -> Iterator[str]:
    """Yield the lines that are not empty."""
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as lines:  # \r is blank in JSON
        for line in lines:
            if line.strip():
                yield line


def _progress(num_lines: int, num_done: int) -> tqdm:
    """Return a progress bar, which is shown on a terminal only."""
    file: IO[str] = sys.stderr
    return tqdm(total=num_lines, initial=num_done, desc="requests", unit="", file=file, disable=None)
