"""Routing in a simulated fleet: python bench/routing.py [--trace FILE] [--quick] [--json FILE] [--only PART].

Replays a trace (default: the small one of this folder) over 8 to 1,000 workers, half of which prefill, as fast and in
as many copies as would keep half of the prefill workers busy if nothing were cached; simulation/fleet.py says what is
modelled. The routing function, the rates that it learns and the shortlists are the gateway's own. Hit rates are shares
of all prompt tokens that no worker computed. They are compared with one LRU cache as large as those of all prefill
workers, which every request reaches at no cost, with one as large as those of all workers, and (limit) with an
unbounded one."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import hashlib
import math
import random
import statistics
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path

from baton.loadgen.trace import TraceEntry, read_trace
from baton.service.slo import Slo
from baton.v1 import worker_pb2 as pb
from bench.lib.paths import ROOT
from bench.lib.report import Report, finish, nearest_rank, start
from bench.simulation.fleet import Fleet, Machine, Request, copies, oracle_hits
from gateway.config.settings import GatewaySettings
from gateway.fleet.registry import Registry
from gateway.link.worker_link import LinkState
from gateway.model.model_folder import Defaults, ModelFolder
from gateway.prefix.memory_index import MemoryIndex
from gateway.prefix.prefix_matches import Matches
from gateway.routing.routing import RoutingRequest

TRACE = ROOT / "bench" / "traces" / "conversation.jsonl"
TRACE_OPTION = {"--trace": dict(type=Path, default=TRACE, metavar="FILE", help="replay this trace")}
SIZES = (8, 64, 256, 1000)
RATES = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
SLO = Slo(ttft_s=5.0, tpot_s=0.1)  # prompts of these traces have 12,000 tokens and more
LARGE_CACHE = 4_000_000
LOAD = 0.5
LATER_S = 30.0
WORKERS_A_TRACE = 8  # that one copy of the trace keeps busy
PARTS = ("costs", "splits", "regrets", "hits")


def run(num_workers: int, entries: Sequence[TraceEntry], split: str = "auto", machine: Machine = Machine()):
    fleet = Fleet(num_workers, machine, split, SLO)
    return fleet, fleet.run(entries)


def busy(entries: Sequence[TraceEntry]) -> list[TraceEntry]:
    """Return the trace at the speed that keeps LOAD of the prefill workers busy if nothing is cached."""
    tokens_per_s = sum(entry.num_prompt for entry in entries) / entries[-1].at_s
    return scaled(entries, LOAD * WORKERS_A_TRACE / 2 / Machine().token_s / tokens_per_s)


def scaled(entries: Sequence[TraceEntry], rate: float) -> list[TraceEntry]:
    return [TraceEntry(entry.at_s / rate, entry.num_prompt, entry.num_output, entry.hash_ids) for entry in entries]


# ---- hits and balance ----


def hits(
    report: Report, name: str, entries: Sequence[TraceEntry], num_workers: int, machine: Machine, balance: bool
) -> None:
    fleet, requests = run(num_workers, entries, machine=machine)
    num_tokens = sum(entry.num_prompt for entry in entries)
    prefill_tokens = machine.cached_tokens * len(fleet.prefill)

    def oracle(cached_tokens: int | None) -> float:
        return 100 * oracle_hits(entries, cached_tokens) / num_tokens

    rate = 100 * sum(request.num_cached for request in requests) / num_tokens
    limit = oracle(None)
    report.add(
        f"{name}: hit rate over the oracle's",
        rate,
        "% of tokens",
        against=oracle(prefill_tokens),
        limit=limit,
        goal="ratio >= 0.95",
    )
    all_tokens = machine.cached_tokens * num_workers
    report.add(
        f"{name}: ... over one cache of all workers", rate, "% of tokens", against=oracle(all_tokens), limit=limit
    )
    if balance:
        prefill_s = [worker.work_s for worker in fleet.prefill]
        decode_s = [worker.sequence_s for worker in fleet.decode]
        for role, work in (("prefill", prefill_s), ("decode", decode_s)):
            report.add(
                f"{name}: busiest {role} worker over the mean",
                max(work),
                "s" if role == "prefill" else "sequence s",
                against=statistics.mean(work),
                goal="ratio <= 1.3",
            )
        off = [abs(request.predicted_s - request.ttft_s) / request.ttft_s for request in requests]
        report.add(f"{name}: TTFT, predicted wrong by (median)", 100 * statistics.median(off), "%")


# ---- the adaptive split ----


def splits(report: Report, entries: Sequence[TraceEntry], num_workers: int, rate: float) -> None:
    """Compare mean latency and goodput of the three settings on the same fleet, and of a fleet where no worker only
    prefills."""
    means, goods = {}, {}
    arms = {"auto": (0.5, "auto"), "always": (0.5, "always"), "never": (0.5, "never"), "whole": (0.0, "never")}
    for name, (prefill_share, split) in arms.items():
        requests = Fleet(num_workers, Machine(), split, SLO, prefill_share=prefill_share).run(scaled(entries, rate))
        means[name] = statistics.mean(request.e2e_s for request in requests)
        goods[name] = _goodput(requests)
    name = f"rate x {rate:g}"
    report.add(
        f"{name}: best of always and never over adaptive, mean latency",
        min(means["always"], means["never"]),
        "s",
        against=means["auto"],
        goal="ratio >= 0.95",
    )
    best = max(goods["always"], goods["never"])
    report.add(
        f"{name}: adaptive over best of always and never, goodput",
        goods["auto"],
        "requests/s",
        against=best,
        goal="ratio >= 0.95",
    )
    report.add(
        f"{name}: adaptive over {num_workers} whole workers, goodput",
        goods["auto"],
        "requests/s",
        against=goods["whole"],
    )


def regrets(report: Report, entries: Sequence[TraceEntry], num_workers: int, rate: float, num_decisions: int) -> None:
    """Measure how much longer requests took after a decision of `auto` than after the opposite one: the same trace
    twice, with one request decided otherwise and all others on the same workers. The differences of all requests that
    were in the fleet with it are summed, as a share of its own time; a decision that was better counts as 0."""
    entries = scaled(entries, rate)
    taken = Fleet(num_workers, Machine(), "auto", SLO).run(entries)
    chosen = random.Random(0).sample(range(len(entries) // 10, len(entries)), num_decisions)
    lost = [_regret(taken, entries, num_workers, number) for number in chosen]
    name = f"rate x {rate:g}: regret of a decision"
    report.add(f"{name}, mean", 100 * statistics.mean(lost), "%", goal="value <= 3")
    report.add(f"{name}, p95", 100 * nearest_rank(lost, 95), "%", goal="value <= 10")


def _regret(taken: Sequence[Request], entries: Sequence[TraceEntry], num_workers: int, number: int) -> float:
    """Return what the requests in the fleet with this one, including it, would have saved, as a share of its time."""
    one = taken[number]
    beside = [i for i, each in enumerate(taken) if each.at_s <= one.last_s and each.last_s >= one.at_s]
    decided = {each.number: each.decision for each in taken if each is not one}
    fleet = Fleet(num_workers, Machine(), "auto", SLO, decided=decided, turned=number)
    until = max(taken[i].last_s for i in beside) + LATER_S  # arrivals while they run delay them, both times
    turned = fleet.run([entry for entry in entries if entry.at_s <= until])
    as_it_was, other_way = (sum(each[i].e2e_s for i in beside) for each in (taken, turned))
    return max(0.0, as_it_was - other_way) / one.e2e_s


def _goodput(requests: Sequence[Request]) -> float:
    met = sum(SLO.met(request.ttft_s, request.tpot_s, request.e2e_s) for request in requests)
    return met / max(request.last_s for request in requests)


# ---- what a decision costs ----


def costs(report: Report, num_requests: int) -> None:
    """Measure the cost of a request to the index and to `Registry.route` in fleets of all sizes. All workers hold the
    first span of its prompt of 125, and eight of them ever more."""
    medians = {}
    for num_workers in SIZES:
        registry, seconds = _registry(num_workers), []
        index, rng, ask = registry._index, random.Random(num_workers), RoutingRequest(8000, 8001)
        chains = [[b"first" * 6, *(rng.randbytes(32) for _ in range(124))] for _ in range(64)]
        for link in registry.links:
            index.apply(link.worker_id, pb.BlockEvents(snapshot=True, sealed=chains[0][:1]))
        for chain in chains:
            for number, link in enumerate(rng.sample(registry.links, 8)):
                index._feeds[link.worker_id].subscribe()
                held = [*index._feeds[link.worker_id].spans, *chain[: 10 * (number + 1)]]
                index.apply(link.worker_id, pb.BlockEvents(snapshot=True, sealed=held))
        for i in range(num_requests):
            begun = time.perf_counter()
            _ = registry.fleets[0].model.context  # as a gateway does before it routes
            registry.fleets[0].router.route(ask, _now(index.lookup(chains[i % len(chains)])))
            seconds.append(time.perf_counter() - begun)
        medians[num_workers] = 1e6 * statistics.median(seconds)
        # Up to 32 workers all are examined, and from there on as many; what grows is how rarely each is in the
        # processor's cache. The goal: growth no faster than the logarithm.
        name, against = f"{num_workers} workers: cost of a decision", medians.get(64) if num_workers > 64 else None
        goal = f"ratio <= {math.log(num_workers) / math.log(64):.2f}" if against else ""
        report.add(f"{name}, p50", medians[num_workers], "us", against=against, goal=goal)
        report.add(f"{name}, p99", 1e6 * nearest_rank(seconds, 99), "us")


def _now(waited: Coroutine) -> Matches:
    """Return a coroutine's result; the embedded index waits for nothing."""
    try:
        waited.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waits")


def _registry(num_workers: int) -> Registry:
    folder = ModelFolder(Path("/m"), "m", 1 << 17, 1000, frozenset(), Defaults(), b"", b"", None, {})
    half = num_workers // 2
    addresses = [f"127.0.0.1:{port}" for port in range(1, num_workers + 1)]
    settings = GatewaySettings(
        model=Path("/m"), prefill_workers=tuple(addresses[:half]), decode_workers=tuple(addresses[half:])
    )
    registry = Registry(settings, MemoryIndex(), b"secret")
    registry.add(folder)
    for link in registry.links:
        role = "prefill" if link in registry.prefill else "decode"
        hello = pb.Hello(
            roles=[role],
            instance=hashlib.sha256(link.address.encode()).digest()[:16],
            epoch=1,
            host_id=link.address,
            limits=pb.Limits(max_model_len=1 << 17, max_num_seqs=128, block_size=16),
            kv_gives=["kv"],
            kv_takes=["kv"],
            model=pb.ModelCard(transports=["tcp", "shm"], vocab_size=1000),
            kv_token_bytes=65_536,
        )
        assert link._on_hello(link, hello) is None
        link.note_hello(hello)
        link._become(LinkState.SERVING, "")
        link.note_worked(math.inf)  # a fleet that has served for a while
    return registry


def fleet_of(report: Report, trace: Sequence[TraceEntry], num_workers: int, most: int | None) -> None:
    """Measure hits and balance of a fleet of this size, on `most` entries. One copy: the whole trace. Many copies: as
    much of its beginning as can be simulated in a minute or two."""
    entries = trace if num_workers == WORKERS_A_TRACE else trace[: max(700, 80_000 // num_workers)]
    entries = copies(entries[:most], num_workers // WORKERS_A_TRACE)
    hits(report, f"{num_workers} workers", entries, num_workers, Machine(), True)
    if num_workers <= 64:
        large = Machine(cached_tokens=LARGE_CACHE)
        hits(report, f"{num_workers} workers, caches of {LARGE_CACHE // 10**6} M", entries, num_workers, large, False)


def main() -> int:
    arguments, report = start("routing", "Routing in a simulated fleet.", PARTS, TRACE_OPTION)
    quick, parts = arguments.quick, arguments.only
    trace = busy(read_trace(arguments.trace))
    if arguments.trace != TRACE:
        report.command += f" --trace FILE ({len(trace):,} requests)"
    if "costs" in parts:
        costs(report, 300 if quick else 3000)
    part = trace[: 1500 if quick else 3000]
    for rate in RATES[2::2] if quick else RATES:
        if "splits" in parts:
            splits(report, part, WORKERS_A_TRACE, rate)
        if "regrets" in parts:
            regrets(report, part, WORKERS_A_TRACE, rate, 20 if quick else 200)
    for num_workers in (SIZES[:2] if quick else SIZES) if "hits" in parts else ():
        fleet_of(report, trace, num_workers, 2000 if quick else None)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
