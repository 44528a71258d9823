"""Report metrics of a worker: its load at each scrape, and each leg once, when it has ended."""

import resource
from collections.abc import Mapping

from baton.engine.engine import Engine
from baton.service.observe.core_wait import CoreWait
from baton.service.observe.metrics import PHASE_BUCKETS, RATIO_BUCKETS, Count, Gauge, Metrics
from baton.worker.kv.pool_memory import PoolMemory
from baton.worker.legs.leg import Leg
from baton.worker.observe.gpu_health import GpuHealth, readings_of
from baton.worker.observe.roofline import Cost, Roofline
from baton.worker.observe.tables import Tables

SPEEDUP_BUCKETS = (0.5, 0.8, 0.9, 0.95, 0.98, 1.0, 1.05, 1.1, 1.25, 1.5, 2, 2.5, 3, 4, 6)


class WorkerMeters:
    """The metrics of a worker."""

    def __init__(
        self,
        metrics: Metrics,
        engine: Engine,
        memory: PoolMemory,
        roofline: Roofline | None,
        num_denied: Mapping[tuple[str, str], int],
    ):
        """Add the worker's metrics to `metrics`. `memory`: the KV pool's. `roofline`: None if it was not measured.
        `num_denied`: denied calls by (method, reason), as the guard counts them."""
        self._metrics = metrics
        self._engine, self._pool, self._roofline, self._cost = engine, memory, roofline, Cost(engine)
        self._prefix = metrics.counter("baton_prefix_tokens", "prompt tokens whose KV was found in a cache", "tier")
        self._bytes = metrics.counter("baton_transfer_bytes", "bytes of KV pulled from other workers", "transport")
        self._transfer = metrics.histogram(
            "baton_transfer_seconds", "time from the first request for KV to the last confirmation", PHASE_BUCKETS
        )()
        self._hidden = metrics.histogram(
            "baton_transfer_hidden_ratio", "fraction of a transfer that overlapped prefill", RATIO_BUCKETS
        )()
        self._spec = metrics.counter(
            "baton_spec_tokens", "proposed tokens, by whether the model accepted them", "result"
        )
        self._positions = metrics.counter(
            "baton_spec_position_tokens", "proposed tokens, by position in the proposal", "position", "result"
        )
        self._drafts = metrics.counter("baton_spec_drafts", "steps of a sequence that had a proposal")()
        self._speedup = metrics.histogram(
            "baton_spec_speedup_ratio", "measured speed of a request over plain decoding", SPEEDUP_BUCKETS
        )()
        self._preemptions = metrics.counter("baton_preemptions", "sequences preempted for lack of blocks")()
        metrics.collect(
            Gauge("baton_sequences_running", "sequences in the batch", lambda: engine.load_report().num_running),
            Gauge(
                "baton_sequences_waiting", "sequences that wait for blocks", lambda: engine.load_report().num_waiting
            ),
            Gauge("baton_batch_size", "sequences in the last step", lambda: engine.last_batch_size),
            Gauge("baton_kv_blocks", "KV blocks, by holder", lambda: engine.load_report().blocks_by_holder, "holder"),
            Gauge("baton_memory_bytes", "memory, by use", self._memory, "kind"),
            Gauge("baton_utilisation", "achieved rate over the device's limit", self._utilisation, "limit"),
            Gauge(
                "baton_core_wait_ratio",
                "share of the time in which its thread that waits longest waits for a core",
                CoreWait().share,
            ),
            Count("baton_rank_wait_seconds", "time that a rank has waited for others", self._waits, "rank"),
            Count("baton_denied", "denied calls", lambda: num_denied, "method", "reason"),
        )

    def watch(self, tables: Tables) -> None:
        self._metrics.collect(
            Gauge("baton_table_entries", "entries of tables that are empty when nothing runs", tables.counts, "table")
        )

    def watch_gpus(self, gpus: Mapping[str, GpuHealth]) -> None:
        self._metrics.collect(*readings_of(gpus))

    def ended(self, leg: Leg) -> None:
        """Count a leg that has just ended."""
        if done := leg.prefill_done:  # pulled tokens are a prefix of whole blocks, and count as cached too
            self._prefix("pulled").inc(leg.num_pulled_tokens)
            self._prefix("local").inc(max(0, done.num_cached_tokens - leg.num_pulled_tokens))
        if report := leg.fetch_report:
            self._bytes(report.transport).inc(report.num_bytes)
            self._transfer.observe(report.transfer_s)
            if report.transfer_s > 0:
                self._hidden.observe(max(0.0, 1.0 - report.after_last_ready_s / report.transfer_s))
        if report := leg.report:
            self._preemptions.inc(report.num_preemptions)
            accepted = report.num_accepted_tokens
            self._spec("accepted").inc(accepted)
            self._spec("rejected").inc(report.num_draft_tokens - accepted)
            self._drafts.inc(report.num_drafts)
            for position, num_proposed in enumerate(report.proposed_by_position, start=1):
                num_accepted = report.accepted_by_position[position - 1]
                self._positions(str(position), "accepted").inc(num_accepted)
                self._positions(str(position), "rejected").inc(num_proposed - num_accepted)
            if report.num_drafts:
                self._speedup.observe(report.speedup)

    def _utilisation(self) -> dict[str, float]:
        if self._roofline is None:
            return {}
        rates = self._engine.work.rates()
        return {
            "bandwidth": self._cost.bytes_per_s(rates) / self._roofline.bytes_per_s,
            "flops": self._cost.flops_per_s(rates) / self._roofline.flops_per_s,
        }

    def _waits(self) -> dict[str, float]:
        """Return the seconds that each rank has waited. The rank that the others wait for waits least."""
        if (ranks := self._engine.ranks) is None:
            return {}
        return {str(rank): ranks.group.waited_s(rank) for rank in range(ranks.group.degree)}

    def _memory(self) -> dict[str, float]:
        mirror = self._pool.num_mirror_bytes
        return {
            "weights": self._engine.runner.model.weights.num_bytes,
            "kv": self._engine.pool.bytes.nbytes,
            **({} if mirror is None else {"kv_mirror": mirror}),
            "draft": self._engine.speculator.num_bytes,
            "activations": self._engine.runner.launcher.activations.num_bytes,
            "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
