"""Find the smallest stack that holds a load: sizes whose capacity could suffice are tried in virtual time, the smallest
first."""

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from baton.engine.core.config import DEGREES, EngineConfig, resolve
from baton.engine.core.device import PROCESS_BYTES
from baton.engine.core.model_errors import ModelError
from baton.engine.core.model_spec import ModelSpec
from baton.loadgen.summary import percentile
from baton.loadgen.trace import TraceEntry
from baton.planning.devices import Device
from baton.planning.efficiency import EXTRAPOLATED, Efficiencies
from baton.planning.memory import Form, MemoryPlan, held_weights, plan_memory
from baton.planning.step_time import StepTimes
from baton.planning.virtual_stack import ServedRequest, StackShape, VirtualStack
from baton.planning.workload import mean_fresh
from baton.service.slo import Slo

WANTED_FORMS = ("none", "int8", "int4-g32")  # unless others are asked for; fp8 has the bytes of int8
_BATCHES = {"cuda": (256, 128, 64, 32, 16), "cpu": (64, 32, 16, 8)}
_CHUNKS = {"cuda": (8192, 2048), "cpu": (512, 512)}  # of prefill and decode workers, by default
_MOST_BUSY = 0.9  # of a worker's time, at which the search begins: what a perfect stack would need, and a little more
_MOST_WORK = 1e15  # in workers; larger values are no longer meaningful
_NUM_MORE = 4  # workers beyond those for a load without cache hits: the search ends there
_CURVE = (0.5, 0.8, 1.0, 1.25, 1.6)  # shares of the requested rate


class Ask(NamedTuple):
    """The question. `entries` arrive at `rate` a second; `attainment` is the share of requests that must meet the
    SLO."""

    entries: Sequence[TraceEntry]
    rate: float
    slo: Slo
    attainment: float
    forms: Sequence[Form] = WANTED_FORMS
    kv_forms: Sequence[str] = ("auto", "int8")
    max_devices: int = 64
    is_stored: bool = False  # the model is stored in its form, so no option asks for it


@dataclass(frozen=True)
class LoadOutcome:
    """What a stack did with a load. Times in seconds; `goodput` in requests per second that met the SLO."""

    rate: float
    met: float
    goodput: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    busy: dict[str, float]
    output_tokens_per_s: float
    num_refused: int


@dataclass
class WorkerPlan:
    """One kind of worker: form, KV form, degree and batch, with its memory and step times."""

    form: Form
    kv_form: str
    asked_kv: str
    degree: int
    batch: int
    memory: MemoryPlan
    configs: dict[str, EngineConfig]
    times: StepTimes
    is_stored: bool = False

    @property
    def room(self) -> int:
        """How many such workers fit into the memory that workers on a CPU share."""
        device = self.times.device
        if device.kind != "cpu" or device.cores is None:
            return sys.maxsize
        return device.memory_bytes // (self.memory.total_bytes + (self.degree - 1) * PROCESS_BYTES)

    @property
    def words(self) -> str:
        degree = f", {self.degree} ranks" if self.degree > 1 else ""
        return f"{'bf16' if self.form == 'none' else self.form}, kv {self.kv_form}{degree}"


@dataclass
class StackChoice:
    """A stack that holds the load, and its goodput at rates around the requested one."""

    worker: WorkerPlan
    num_prefill: int
    num_decode: int
    outcome: LoadOutcome
    bound: str
    curve: list[LoadOutcome] = field(default_factory=list)

    @property
    def num_devices(self) -> int:
        return (self.num_prefill + self.num_decode) * self.worker.degree

    @property
    def words(self) -> str:
        return f"{self.num_prefill}:{self.num_decode} {self.worker.words}"


class NoPlan(ValueError):
    """No stack that was tried holds the load; one line with the nearest one and its limit."""


def candidates(spec: ModelSpec, device: Device, efficiencies: Efficiencies, ask: Ask) -> Iterator[WorkerPlan]:
    """Yield the kinds of workers whose model fits, each with the largest batch whose steps meet the SLO."""
    context = round(statistics.mean(entry.num_prompt + entry.num_output / 2 for entry in ask.entries))
    longest = max(entry.num_prompt + max(1, entry.num_output) for entry in ask.entries)
    refused: list[str] = []
    found = False
    known = efficiencies.forms("linear")
    for form in ask.forms:
        if isinstance(form, str) and "*" not in known and form not in known:
            continue
        for kv_form in ask.kv_forms:
            for degree in DEGREES if device.kind == "cpu" and device.cores else (1,):
                if degree > 1 and (device.cores or 0) < degree * device.threads:
                    continue
                try:
                    kind = _candidate(spec, device, efficiencies, ask.slo, form, kv_form, degree, context, longest)
                    yield replace(kind, is_stored=ask.is_stored)
                    found = True
                except (ModelError, ValueError) as error:
                    refused.append(f"{form}: {error}")
    if not found:
        raise NoPlan(f"{spec.name} on {device.name}: {refused[0] if refused else 'no form of it is known there'}")


def _candidate(
    spec: ModelSpec,
    device: Device,
    efficiencies: Efficiencies,
    slo: Slo,
    form: Form,
    kv_form: str,
    degree: int,
    context: int,
    longest: int,
) -> WorkerPlan:
    kv = "bf16" if kv_form == "auto" else kv_form
    times = StepTimes(spec, device, efficiencies, form, kv, degree)
    max_len = min(spec.longest_context, max(2048, 1 << (longest - 1).bit_length()))
    if longest > max_len:
        raise ValueError(f"a request of {longest} tokens, the model's context is {spec.longest_context}")
    held_weights(spec, form, device.kind == "cpu", degree)  # reports a degree that workers would refuse
    *larger, smallest = _BATCHES[device.kind]
    _configs(spec, device, form, kv, smallest, max_len)  # first reports what does not fit at all
    if slo.tpot_s is not None and (alone_s := times.decode_s(1, context)) > slo.tpot_s:
        raise ValueError(f"a token takes {1e3 * alone_s:.1f} ms even alone")
    for batch in larger:
        configs, plan = _configs(spec, device, form, kv, batch, max_len)
        fits = plan.num_kv_tokens >= batch * context
        if fits and (slo.tpot_s is None or times.decode_s(batch, context) <= slo.tpot_s):
            return WorkerPlan(form, kv, kv_form, degree, batch, plan, configs, times)
    configs, plan = _configs(spec, device, form, kv, smallest, max_len)
    return WorkerPlan(form, kv, kv_form, degree, smallest, plan, configs, times)


def _configs(
    spec: ModelSpec, device: Device, form: Form, kv: str, batch: int, max_len: int
) -> tuple[dict[str, EngineConfig], MemoryPlan]:
    """Return the config of each role, and the memory of a decode worker. Raises ValueError if it does not fit."""
    configs: dict[str, EngineConfig] = {}
    prefill_chunk, decode_chunk = _CHUNKS[device.kind]
    for role, chunk in (("prefill", prefill_chunk), ("decode", decode_chunk)):
        config = EngineConfig(
            model=spec.folder,
            dtype="bf16",
            kv_dtype=kv,
            max_num_seqs=batch,
            max_model_len=max_len,
            max_num_batched_tokens=max(chunk, batch + 64),
            threads=device.threads,
        )
        plan = plan_memory(spec, device, config, form)
        configs[role] = resolve(replace(config, num_blocks=plan.num_blocks), spec)
    return configs, plan_memory(spec, device, configs["decode"], form)


class _Work(NamedTuple):
    """How many workers are always busy reading prompts, and writing answers."""

    read: float
    write: float

    @property
    def num_workers(self) -> int:
        return max(1, math.ceil(min(self.read + self.write, _MOST_WORK) / _MOST_BUSY - 0.5))


def _work(candidate: WorkerPlan, ask: Ask, *, finds_all: bool) -> _Work:
    """Return the work of the load if prompts find everything that was read before in the cache (`finds_all`), or
    nothing."""
    entries = ask.entries
    prompt = statistics.mean(entry.num_prompt for entry in entries)
    output = statistics.mean(entry.num_output for entry in entries)
    num_read = mean_fresh(entries) if finds_all else prompt
    chunk = candidate.configs["prefill"].max_num_batched_tokens
    read = ask.rate * candidate.times.prefill_s(round(num_read), chunk)
    write = ask.rate * output * candidate.times.decode_s(candidate.batch, prompt + output / 2) / candidate.batch
    return _Work(read, write)


def sizes(candidate: WorkerPlan, ask: Ask) -> Iterator[tuple[int, int]]:
    """Yield (prefill, decode) with ever more workers, from the need with perfect caches upwards. (0, n): workers that
    do both."""
    least, cacheless = (_work(candidate, ask, finds_all=finds_all) for finds_all in (True, False))
    most = min(cacheless.num_workers + _NUM_MORE, ask.max_devices // candidate.degree, candidate.room)
    for total in range(least.num_workers, most + 1):
        wanted = total * least.read / (least.read + least.write)
        splits = sorted(range(1, total), key=lambda num: abs(num - wanted))[:2]
        yield 0, total
        yield from ((num, total - num) for num in splits)


def evaluate(
    candidate: WorkerPlan, num_prefill: int, num_decode: int, ask: Ask, rate: float | None = None
) -> LoadOutcome:
    """Serve the load in virtual time and return the outcome. `rate`: other than the requested one."""
    rate = rate or ask.rate
    scale = ask.rate / rate
    entries = [replace(entry, at_s=entry.at_s * scale) for entry in ask.entries]
    configs = {role: _without_idle_blocks(config, entries) for role, config in candidate.configs.items()}
    shape = StackShape(
        num_prefill, num_decode, configs["prefill"], configs["decode"], "auto" if num_prefill else "never"
    )
    stack = VirtualStack(shape, dict.fromkeys(("prefill", "decode"), candidate.times), ask.slo)
    served = stack.run(entries)
    return summarize(served, stack, rate, ask.slo)


def _without_idle_blocks(config: EngineConfig, entries: Sequence[TraceEntry]) -> EngineConfig:
    """Return a config without blocks that these requests, even twice over, could not fill: a small model on a large
    device has millions, and each costs the virtual engine time."""
    assert config.num_blocks is not None, "the config is resolved"
    most = sum((entry.num_prompt + entry.num_output) // config.block_size + 2 for entry in entries)
    return replace(config, num_blocks=min(config.num_blocks, 2 * most))


def summarize(served: Sequence[ServedRequest], stack: VirtualStack, rate: float, slo: Slo) -> LoadOutcome:
    answered = [request for request in served if not request.refused]
    met = sum(request.met(slo) for request in served) / len(served)
    ttfts = [request.ttft_s for request in answered] or [math.inf]
    tpots = [tpot for request in answered if (tpot := request.tpot_s) is not None] or [0.0]
    last = served[-1].entry.at_s or stack.now
    num_tokens = sum(request.num_output for request in answered)
    busy = {
        role: statistics.mean(
            [min(1.0, worker.busy_s / stack.now) for worker in stack.workers if worker.role == role] or [0.0]
        )
        for role in ("prefill", "decode")
    }
    return LoadOutcome(
        rate,
        met,
        met * min(rate, len(served) / last),
        percentile(ttfts, 50),
        percentile(ttfts, 95),
        percentile(tpots, 50),
        percentile(tpots, 95),
        busy,
        num_tokens / stack.now,
        len(served) - len(answered),
    )


def find(
    spec: ModelSpec, device: Device, efficiencies: Efficiencies, ask: Ask, say: Callable[[str], None] = lambda _: None
) -> list[StackChoice]:
    """Return the best stacks with their curves, at most three: the smallest first, and of equal sizes those that round
    least. Raises NoPlan."""
    choices, nearest = [], ""
    best = 0.0
    kinds = list(candidates(spec, device, efficiencies, ask))
    for candidate in kinds:
        for num_prefill, num_decode in sizes(candidate, ask):
            fewest = min((choice.num_devices for choice in choices), default=ask.max_devices)
            if (num_prefill + num_decode) * candidate.degree > fewest + 1:
                break
            say(f"{num_prefill}:{num_decode} {candidate.words}")
            outcome = evaluate(candidate, num_prefill, num_decode, ask)
            choice = StackChoice(
                candidate, num_prefill, num_decode, outcome, _bound(candidate, num_prefill, outcome, ask)
            )
            if outcome.met >= ask.attainment:
                choices.append(choice)
            elif outcome.met >= best:
                best, nearest = outcome.met, f"{choice.words} meets it for {outcome.met:.0%}, bound by {choice.bound}"
    if not choices:
        why = nearest or _too_few(kinds, ask)
        raise NoPlan(f"nothing of up to {ask.max_devices} devices serves {ask.rate:g} requests/s with {ask.slo}: {why}")
    # Of equal sizes, prefer those that round least: a plan does not know what a form costs in quality.
    forms, kv_forms = list(ask.forms), list(ask.kv_forms)
    choices.sort(
        key=lambda choice: (
            choice.num_devices,
            forms.index(choice.worker.form),
            kv_forms.index(choice.worker.asked_kv),
            -choice.outcome.met,
            choice.outcome.tpot_p95_s,
        )
    )
    kept: dict[str, StackChoice] = {}
    for choice in choices:
        kept.setdefault(choice.words, choice)
    found = list(kept.values())[:3]
    for choice in found:
        for part in _CURVE:
            rate = part * ask.rate
            say(f"{choice.words} at {rate:.3g} requests/s")
            choice.curve.append(evaluate(choice.worker, choice.num_prefill, choice.num_decode, ask, rate))
    return found


def _too_few(kinds: Sequence[WorkerPlan], ask: Ask) -> str:
    """Return why no size was tried."""
    fewest = min(kinds, key=lambda kind: kind.degree * _work(kind, ask, finds_all=True).num_workers)
    least = _work(fewest, ask, finds_all=True).num_workers
    needed = f"it needs {fewest.degree * least} at least"
    if least <= fewest.room:
        return needed
    size, memory_bytes = fewest.memory.total_bytes, fewest.times.device.memory_bytes
    return f"{needed}, and {fewest.room} workers of {size:,} bytes have room in this machine's {memory_bytes:,}"


def _bound(candidate: WorkerPlan, num_prefill: int, outcome: LoadOutcome, ask: Ask) -> str:
    """Return what limits a stack, in the words of docs/howto/scale.md."""
    reads = "prefill compute"
    late_ttft = ask.slo.ttft_s is not None and outcome.ttft_p95_s > ask.slo.ttft_s
    if not num_prefill:
        return "decode bandwidth" if not late_ttft and not outcome.num_refused else reads
    return reads if outcome.busy["prefill"] > outcome.busy["decode"] or late_ttft else "decode bandwidth"


def confidence(efficiencies: Efficiencies, device: Device) -> str:
    """Return how sure a plan is, by what it was computed from."""
    if device.kind == "cpu" and (device.name, device.threads) == (efficiencies.name, efficiencies.threads):
        return efficiencies.confidence
    return EXTRAPOLATED
