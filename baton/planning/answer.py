"""A plan in words, in JSON, and as what starts it: command lines, a compose override, Helm values."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.planning.devices import Device
from baton.planning.search import Ask, LoadOutcome, StackChoice, WorkerPlan

_CONFIDENCE = {
    "measured": "kernels were measured on this kind of device, at these shapes",
    "interpolated": "kernels were measured on this kind of device, between these shapes",
    "extrapolated": "not every kernel was measured at these shapes on such a device: the nearest efficiency, or an assumed one; try it before you buy",
}


@dataclass(frozen=True)
class PlanReport:
    """A plan to be printed: the stacks that hold the load, what was asked, and how sure the answer is (measured,
    interpolated or extrapolated). `price` is that of a device for an hour, `model` as commands take it."""

    choices: Sequence[StackChoice]
    ask: Ask
    device: Device
    confidence: str
    price: float | None
    model: str

    def as_text(self) -> str:
        """Return the answer for a terminal, the smallest stack first."""
        best, ask, device = self.choices[0], self.ask, self.device
        lines = [
            f"{best.num_prefill} prefill and {best.num_decode} decode workers of {best.worker.words} on {device.name}: "
            f"{best.num_devices} devices, {_met(best.outcome)} of requests meet {ask.slo} at {ask.rate:g}/s",
            f"bound by {best.bound}; {self.confidence}: {_CONFIDENCE[self.confidence]}",
            "",
            *_memory(best.worker),
            "",
            *_table(self.choices, self.price),
            "",
            "start it:",
            *(f"  {line}" for line in command_lines(best, device, self.model)),
            "compose.yaml, beside it as compose.override.yaml:",
            *(f"  {line}" for line in compose_override(best, device)),
            "Helm values:",
            *(f"  {line}" for line in helm_values(best, device)),
        ]
        return "\n".join(lines)

    def as_json(self) -> str:
        """Return the whole answer as JSON."""
        return json.dumps(
            {
                "device": self.device.name,
                "rate": self.ask.rate,
                "slo": str(self.ask.slo),
                "attainment": self.ask.attainment,
                "confidence": self.confidence,
                "choices": [self._fields_of(choice) for choice in self.choices],
            },
            indent=1,
        )

    def _fields_of(self, choice: StackChoice) -> dict[str, object]:
        return {
            "prefill": choice.num_prefill,
            "decode": choice.num_decode,
            "devices": choice.num_devices,
            "form": str(choice.worker.form),
            "kv_form": choice.worker.kv_form,
            "degree": choice.worker.degree,
            "max_num_seqs": choice.worker.batch,
            "memory": _memory_fields(choice.worker),
            "bound": choice.bound,
            "usd_per_million_output_tokens": cost(choice, self.price),
            "outcome": vars(choice.outcome),
            "curve": [vars(outcome) for outcome in choice.curve],
            "command_lines": command_lines(choice, self.device, self.model),
            "compose_override": "\n".join(compose_override(choice, self.device)) + "\n",
            "helm_values": "\n".join(helm_values(choice, self.device)) + "\n",
        }


def cost(choice: StackChoice, price: float | None) -> float | None:
    """Return the cost of a million output tokens at this load, from the hourly price of a device; None without a
    price."""
    tokens_per_s = choice.outcome.output_tokens_per_s
    if price is None or not tokens_per_s:
        return None
    return price * choice.num_devices / (3600 * tokens_per_s) * 1e6


def command_lines(choice: StackChoice, device: Device, model: str) -> list[str]:
    """Return the commands that start the stack on one machine, whose workers are assigned to its devices in turn."""
    options = " ".join(f"--{name}={value}" for name, value in _flags(choice.worker).items())
    roles = f"--prefill {choice.num_prefill} --decode {choice.num_decode}"
    return [f"baton up --model {model} {roles} {options} --device {device.kind}"]


def compose_override(choice: StackChoice, device: Device) -> list[str]:
    """Return one host's workers and their settings for compose.override.yaml. On GPUs each worker is a service, since
    the containers of one service compute on the same GPU."""
    lines, gpus = ["services:"], list(map(str, range(choice.num_devices)))
    own = _environment(choice.worker)
    for role, number in _numbers(choice):
        service = f"{role}_worker"
        if device.kind == "cpu":
            lines += [f"  {service}_cpu:", f"    deploy: {{ replicas: {number} }}", *_in_compose(own)]
            continue
        if not number:
            lines += [f"  {service}:", "    deploy: { replicas: 0 }"]
        for index in range(number):
            further = [f"  {service}_{index + 1}:", f"    extends: {{ file: compose.yaml, service: {service} }}"]
            lines += further if index else [f"  {service}:"]
            lines += _in_compose({"CUDA_VISIBLE_DEVICES": ",".join(gpus), **own})
            gpus.append(gpus.pop(0))  # a worker computes on the first GPU and copies KV from the others
    return lines


def helm_values(choice: StackChoice, device: Device) -> list[str]:
    """Return the values for the chart in deploy/helm."""
    lines = ["workers:"]
    for role, number in _numbers(choice):
        lines += [f"  {role}:", f"    replicas: {number}"]
        if not number:
            continue
        lines += ["    tag: cuda", "    gpu: {count: 1}"] if device.kind == "cuda" else []
        lines += ["    flags:", *(f"      {name}: {value}" for name, value in _flags(choice.worker).items())]
    return lines


def _numbers(choice: StackChoice) -> list[tuple[str, int]]:
    return [("prefill", choice.num_prefill), ("decode", choice.num_decode)]


def _in_compose(environment: Mapping[str, str]) -> list[str]:
    return ["    environment:", *(f"      {name}: {value!r}" for name, value in environment.items())]


def _flags(worker: WorkerPlan) -> dict[str, object]:
    config, times = worker.configs["decode"], worker.times
    flags: dict[str, object] = {"max-num-seqs": worker.batch, "max-model-len": config.max_model_len}
    if times.device.kind == "cpu":
        flags["threads"] = config.threads  # otherwise workers divide the cores
        flags["num-blocks"] = config.num_blocks  # otherwise more than two workers of one host have fewer each
    if times.spec.dtype != config.dtype:
        flags["dtype"] = config.dtype  # otherwise it is the folder's
    if worker.form != "none" and not worker.is_stored:
        flags["quantization"] = worker.form
    if worker.kv_form != "bf16":
        flags["kv-dtype"] = worker.kv_form
    if worker.degree > 1:
        flags["tensor-parallel"] = worker.degree
    return flags


def _environment(worker: WorkerPlan) -> dict[str, str]:
    return {f"BATON_{name.replace('-', '_').upper()}": str(value) for name, value in _flags(worker).items()}


def _memory(worker: WorkerPlan) -> list[str]:
    fields = _memory_fields(worker)
    widest = max(len(f"{value:,}") for value in fields.values())
    return ["bytes of one worker:", *(f"  {name:30}{value:>{widest},}" for name, value in fields.items())]


def _memory_fields(worker: WorkerPlan) -> dict[str, int]:
    memory = worker.memory
    return {
        "linear weights": memory.kernel_bytes,
        "embedding and norms": memory.other_weight_bytes,
        "KV": memory.kv_bytes,
        "tokens of KV": memory.num_kv_tokens,
        "largest step (estimate)": memory.step_bytes,
        "process and libraries (estimate)": memory.process_bytes,
        "all": memory.total_bytes,
    }


def _table(choices: Sequence[StackChoice], price: float | None) -> list[str]:
    header = (
        f"{'P:D and form':34}{'devices':>8}{'met':>7}{'TTFT p50/p95 ms':>18}{'TPOT p50/p95 ms':>18}{'tokens/s':>10}"
    )
    lines = [header + (f"{'$/M tokens':>12}" if price is not None else "")]
    for choice in choices:
        found, dollars = choice.outcome, cost(choice, price)
        ttft = f"{1e3 * found.ttft_p50_s:.0f} / {1e3 * found.ttft_p95_s:.0f}"
        tpot = f"{1e3 * found.tpot_p50_s:.1f} / {1e3 * found.tpot_p95_s:.1f}"
        row = f"{choice.words:34}{choice.num_devices:>8}{_met(found):>7}{ttft:>18}{tpot:>18}{found.output_tokens_per_s:>10.0f}"
        lines.append(row + (f"{dollars:>12.3f}" if dollars is not None else ""))
    return lines


def _met(outcome: LoadOutcome) -> str:
    return f"{outcome.met:.1%}"


def curves_of(choices: Sequence[StackChoice]) -> dict[str, list[tuple[float, float]]]:
    """Return goodput over rate for each choice, for a picture."""
    return {choice.words: [(each.rate, each.goodput) for each in choice.curve] for choice in choices}
