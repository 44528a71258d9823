"""More than the stack can do: python bench/overload.py [--quick] [--json FILE].

An open loop (Poisson) against a real local stack, one prefill and one decode worker with the demo model. Requests name
the class `standard`; goodput counts answers within it. The peak is the best of a ladder of rates; 2 x and 5 x are
multiples of the rate at which it was reached. Then two tenants, one of whom sends 50 times what the other does, each
with the same quota. Then a quiet tenant beside one that floods, in each of the ways of processes/flood.py, with quotas
and without: its first tokens beside the flood over those alone, which are taken before and after. Then a canary beside
each abuse of each port (arms/overload_abuse.py).
Overloaded workers leave one core to the gateway and the load generator: a client that is refused by a gateway that
shares its cores with engines waits for their turn (p99 of 30 to 120 ms were seen on two cores). "limit" of a refusal is
how late the load generator itself was when it sent: what this machine did to any process.
"""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import itertools
import multiprocessing
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import psutil

from baton.loadgen.outcome import Outcome
from baton.loadgen.plan import RunPlan
from baton.loadgen.run import run_jobs
from baton.loadgen.workload import Job, Shape, arrivals, drawn
from baton.service.security.access import Access
from baton.service.security.credentials import new_key
from bench.arms.overload_abuse import abuse
from bench.lib.cpu_time import cpu_s
from bench.lib.paths import MODEL
from bench.lib.report import Report, finish, nearest_rank, start
from bench.processes.flood import KINDS, flooding
from gateway.config.slo_classes import BUILT_IN
from tests.support.stack import Stack

VOCAB, PROMPT, OUTPUT = 4096, 512, 32
CLASS = "standard"
SLO = BUILT_IN[CLASS]
SETTLING = 0.25  # of a run, at its beginning: not counted, since rates are still being measured
QUIET_PER_S, FLOOD, QUOTA_REQUESTS = 1.0, 50, 4
REFUSED = re.compile(r"outcome=refused .* total_ms=([0-9.]+)")  # in the gateway's log
CORES = sorted(os.sched_getaffinity(0))
PARTS = ("overload", "tenants", "fairness", "abuse")
FAIR_PROMPT, FAIR_OUTPUT = 256, 4  # of the quiet tenant
CONTEXT = 2048
FLOOD_BEGINS_S, FLOOD_ENDS_S = 2.0, 1.0  # until it has begun, and until it has ended
FAIR_QUOTAS = {"no quotas": "", "quotas": "[default]\nconcurrent_requests = 16\ntokens_per_s = 20000\n"}
LADDER = (0.8, 1.0, 1.25, 1.5)  # of the rate of a closed loop


def send(target: str, per_s: float, seconds: float, seed: int, key_file: Path | None = None) -> list[Outcome]:
    rng = random.Random(seed)
    jobs = drawn(rng, arrivals("poisson", per_s, rng), max(8, round(per_s * seconds)), Shape(PROMPT, OUTPUT))
    plan = RunPlan(target, VOCAB, seed=seed, timeout_s=60, access=Access(api_key_file=key_file), slo_class=CLASS)
    return run_jobs(plan, jobs).outcomes


def counted(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return list(outcomes[int(SETTLING * len(outcomes)) :])


def goodput(outcomes: Sequence[Outcome]) -> float:
    """Return the answers within the class per second of arrivals."""
    good = [each for each in outcomes if each.ok and SLO.met(each.ttft_s, each.tpot_s, each.e2e_s)]
    return len(good) / (outcomes[-1].intended_s - outcomes[0].intended_s)


# ---- peak and overload ----


def overload(report: Report, stack: Stack, seconds: float) -> None:
    target = stack.target
    capacity = closed_loop(target)
    ladder = {share: counted(send(target, share * capacity, seconds, seed)) for seed, share in enumerate(LADDER, 1)}
    best = max(ladder, key=lambda share: goodput(ladder[share]))
    peak = goodput(ladder[best])
    report.add(f"{PROMPT} + {OUTPUT} tokens: peak goodput", peak, "requests/s", limit=capacity)
    gateway = psutil.Process(stack.gateways[0].pid)
    for times in (2, 5):
        begin, before = len(stack.gateways[0].text()), cpu_s(gateway)
        sent = send(target, times * best * capacity, seconds, 10 + times)
        each_ms = 1e3 * (cpu_s(gateway) - before) / len(sent)
        outcomes = counted(sent)
        name = f"{times} x the rate of the peak"
        report.add(
            f"{name}: goodput over the peak", goodput(outcomes), "requests/s", against=peak, goal="ratio >= 0.90"
        )
        answered, refused = [each for each in outcomes if each.ok], [each for each in outcomes if not each.ok]
        if answered:
            late = [each.ttft_s for each in answered]
            report.add(f"{name}: TTFT of the answered, p50", 1e3 * nearest_rank(late, 50), "ms")
            report.add(
                f"{name}: TTFT of the answered, p99",
                1e3 * nearest_rank(late, 99),
                "ms",
                goal=f"value <= {1e3 * SLO.ttft_s:g}",
            )
        if refused:
            took = [1e3 * (each.last_s - each.sent_s) for each in refused]
            report.add(f"{name}: refused after, p50", nearest_rank(took, 50), "ms")
            lag = 1e3 * nearest_rank([each.lag_s for each in outcomes], 99)
            report.add(f"{name}: refused after, p99", nearest_rank(took, 99), "ms", limit=lag, goal="value <= 20")
            within = [float(ms) for ms in REFUSED.findall(stack.gateways[0].text()[begin:])]
            report.add(f"{name}: ... of this in the gateway, p99", nearest_rank(within, 99), "ms")
        report.add(f"{name}: CPU of the gateway", each_ms, "ms/request")
        broken = sum(each.status != "RESOURCE_EXHAUSTED" for each in refused)
        report.add(f"{name}: ended otherwise than by an answer or a refusal", broken, "requests", goal="value <= 0")


def closed_loop(target: str, num: int = 48, concurrency: int = 8) -> float:
    """Return the requests per second of eight concurrent ones, the base of the ladder. The gateway learns its rates
    meanwhile."""
    rng = random.Random(0)
    jobs = drawn(rng, arrivals("constant", 1, rng), num, Shape(PROMPT, OUTPUT))
    ran = run_jobs(RunPlan(target, VOCAB, concurrency), jobs)
    return num / ran.duration_s


# ---- tenants ----


def tenants(report: Report, target: str, keys: dict[str, Path], seconds: float) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        alone = pool.submit(send, target, QUIET_PER_S, seconds, 20, keys["quiet"]).result()
        flood = pool.submit(send, target, FLOOD * QUIET_PER_S, seconds + 4, 21, keys["loud"])
        beside = pool.submit(send, target, QUIET_PER_S, seconds, 20, keys["quiet"]).result()
        loud = flood.result()
        again = pool.submit(send, target, QUIET_PER_S, seconds, 20, keys["quiet"]).result()
    times_ms = [[1e3 * each.ttft_s for each in outcomes if each.ok] for outcomes in (alone, beside, again)]
    name = f"a tenant beside one that sends {FLOOD} x as much"
    for what, of, goal in (("highest TTFT", max, "ratio < 2"), ("TTFT p50", statistics.median, "")):
        alone_ms, beside_ms, again_ms = map(of, times_ms)
        report.add(f"{name}: {what} over alone", beside_ms, "ms", against=alone_ms, goal=goal)
        report.add(f"{name}: {what}: A/A, alone after over before", again_ms, "ms", against=alone_ms)
    share = 100 * sum(each.ok for each in beside) / len(beside)
    report.add(f"{name}: answered", share, "% of its", goal="value >= 99")
    report.add("... of the other's, refused", 100 * sum(not each.ok for each in loud) / len(loud), "% of its")


# ---- fairness ----


def fairness(report: Report, target: str, keys: dict[str, Path], quotas: Path, num: int, texts: dict[str, str]) -> None:
    """Measure the quiet tenant alone, beside a flood, alone, ...: each flood between two times alone."""
    seeds = itertools.count(1000)

    def quiet() -> list[Outcome]:
        """Send the tenant's requests one after the other, so that none delays another."""
        jobs = [Job(i, 0.0, FAIR_PROMPT, FAIR_OUTPUT) for i in range(num)]
        access = Access(api_key_file=keys["quiet"])
        return run_jobs(RunPlan(target, VOCAB, 1, seed=next(seeds), timeout_s=30, access=access), jobs).outcomes

    def highest_ms(*runs: list[Outcome]) -> float:
        return 1e3 * max(each.ttft_s for outcomes in runs for each in outcomes if each.ok)

    for name, text in texts.items():
        quotas.write_text(text)
        quiet()  # the gateway reads the file, and rates are measured
        before = quiet()
        for kind in KINDS:
            with flooding(kind, target, Access(api_key_file=keys["loud"]), VOCAB, CONTEXT):
                time.sleep(FLOOD_BEGINS_S)
                beside = quiet()
            time.sleep(FLOOD_ENDS_S)
            after = quiet()
            where = f"{name}, {kind}"
            before_ms, after_ms = highest_ms(before), highest_ms(after)
            report.add(f"{where}: highest TTFT alone, A/A, after over before", after_ms, "ms", against=before_ms)
            alone = highest_ms(before, after)
            num_refused = sum(not each.ok for each in beside)
            if num_refused < len(beside):
                report.add(
                    f"{where}: highest TTFT over alone", highest_ms(beside), "ms", against=alone, goal="ratio <= 2"
                )
            report.add(f"{where}: not answered", num_refused, "requests", limit=len(beside), goal="value <= 0")
            before = after


@contextmanager
def running(folder: Path, *gateway_options: str) -> Iterator[Stack]:
    with Stack(MODEL, folder, options=("--threads", "1"), gateway_options=gateway_options) as stack:
        yield stack


def pin(pid: int, cores: Sequence[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def spread(stack: Stack) -> None:
    """Pin the prefill worker to one core, the decode worker to the next, everything else to the others. On two cores,
    gateway, decode worker and senders share one."""
    rest = CORES[:-2] or CORES[:1]
    for processes, cores in (
        (stack.prefill, CORES[-1:]),
        (stack.decode, CORES[-2:-1] or CORES),
        (stack.gateways, rest),
    ):
        for process in processes:
            pin(process.pid, cores)
    os.sched_setaffinity(0, rest)


def write_tenants(folder: Path) -> tuple[list[str], dict[str, Path]]:
    """Write tenants' files; return (options of the gateway, tenant -> file with its key)."""
    tables, files = [], {}
    for tenant in ("quiet", "loud"):
        key, key_id, digest = new_key()
        files[tenant] = folder / f"{tenant}.key"
        files[tenant].write_text(key)
        tables.append(f'[keys.{key_id}]\ntenant = "{tenant}"\nsha256 = "{digest}"\n')
    (folder / "credentials.toml").write_text("".join(tables))
    (folder / "quotas.toml").write_text(f"[default]\nconcurrent_requests = {QUOTA_REQUESTS}\n")
    (folder / "secret").write_text(os.urandom(32).hex())
    names = ("credentials", "quotas", "cluster-secret")
    paths = (folder / name for name in ("credentials.toml", "quotas.toml", "secret"))
    return [word for name, path in zip(names, paths, strict=True) for word in (f"--{name}", str(path))], files


def main() -> int:
    arguments, report = start("overload", "More than the stack can do.", PARTS)
    seconds = 5.0 if arguments.quick else 25.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "overload" in arguments.only:
            with running(folder / "open") as stack:
                for process in stack.workers:
                    pin(process.pid, CORES[1:] or CORES)
                overload(report, stack, seconds)
        if "tenants" in arguments.only:
            options, keys = write_tenants(folder)
            with running(folder / "tenants", *options) as stack:
                tenants(report, stack.target, keys, 2 * seconds)
        if "fairness" in arguments.only:
            options, keys = write_tenants(folder)
            with running(folder / "fairness", *options) as stack:
                spread(stack)
                num, texts = (4, {"no quotas": ""}) if arguments.quick else (24, FAIR_QUOTAS)
                fairness(report, stack.target, keys, folder / "quotas.toml", num, texts)
            os.sched_setaffinity(0, CORES)  # for the stack of the next part, and for the report's facts of this machine
        if "abuse" in arguments.only:
            abuse(report, folder / "abuse", arguments.quick)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
