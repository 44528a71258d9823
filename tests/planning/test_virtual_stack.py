"""The stack in virtual time runs the engine's scheduler and the gateway's routing: its requests obey what real ones
do."""

from pathlib import Path

import pytest

from baton.engine.core.config import EngineConfig, resolve
from baton.engine.core.model_spec import ModelSpec
from baton.engine.models.registry import read_spec
from baton.loadgen.trace import TraceEntry
from baton.loadgen.workload import WORKLOADS, Shape
from baton.planning.devices import Device
from baton.planning.efficiency import Efficiencies, HostCosts, Point
from baton.planning.step_time import StepTimes
from baton.planning.virtual_stack import StackShape, VirtualStack
from baton.planning.workload import at_rate, drawn_entries, fitting, span_names
from baton.service.slo import Slo

MODEL = Path(__file__).resolve().parents[2] / "demo" / "target"
POINTS = [Point(kind, "*", 1e6, 1, 0.5) for kind in ("linear", "head", "decode_attention", "prefill_attention")]
HOST = HostCosts(step_s=1e-4, sequence_s=1e-5, request_s=0.002, token_s=1e-5, handover_s=0.002, split_s=0.001)


def make_stack(
    num_prefill=1, num_decode=1, *, cores=None, degree=1, slo=Slo(), concurrency=None, **options
) -> VirtualStack:
    device = Device("test", "cpu" if cores else "cuda", 8 << 30, 1e10, {"bf16": 1e11}, 1e9, cores)
    spec: ModelSpec = read_spec(MODEL)
    defaults = dict(num_blocks=512, max_num_seqs=16, max_model_len=2048, threads=1)
    config = resolve(EngineConfig(model=MODEL, **(defaults | options)), spec)
    times = StepTimes(spec, device, Efficiencies("", HOST, POINTS, True), "none", "bf16", degree)
    shape = StackShape(num_prefill, num_decode, config, config, "auto" if num_prefill else "never")
    return VirtualStack(shape, {"prefill": times, "decode": times}, slo, concurrency)


def check(stack: VirtualStack, served) -> None:
    """Every request ended once, and nothing is left anywhere."""
    for worker in stack.workers:
        worker.engine.check_integrity()
        assert not worker.engine.admission.groups and not worker.num_legs and not worker.waiting_tokens
    for request in served:
        if not request.refused:
            assert request.num_output == request.entry.num_output
            assert request.entry.at_s < request.first_s <= request.last_s


@pytest.mark.parametrize("pair", [(1, 1), (0, 1), (2, 1), (1, 3)])
def test_every_request_is_answered_in_full(pair):
    stack = make_stack(*pair)
    check(stack, stack.run(drawn_entries(20, Shape(300, 24), 60)))


def test_a_pool_that_is_too_small_for_all_delays_and_loses_nothing():
    stack = make_stack(num_blocks=64, max_num_seqs=8)
    served = stack.run(drawn_entries(200, Shape(400, 40), 60))
    check(stack, served)
    assert not any(request.refused for request in served)


def test_time_ends_with_the_last_token_though_some_have_waited():
    stack = make_stack(0, 1, max_num_seqs=4)
    served = stack.run(drawn_entries(200, Shape(100, 20), 30))
    check(stack, served)
    assert not any(request.refused for request in served)
    assert stack.now == pytest.approx(max(request.last_s for request in served), abs=0.001)


def test_the_same_load_takes_the_same_time():
    first, second = (
        [(request.first_s, request.last_s) for request in make_stack().run(drawn_entries(30, Shape(300, 20), 40))]
        for _ in range(2)
    )
    assert first == second


def test_an_idle_stack_takes_what_its_steps_take():
    stack = make_stack(0, 1)
    (request,) = stack.run([TraceEntry(0.0, 200, 11)])
    times = stack._times["decode"]
    assert request.ttft_s == pytest.approx(HOST.request_s + times.prefill_s(200, 512) + HOST.token_s)
    assert request.tpot_s == pytest.approx(times.decode_s(1, 205), rel=0.01)


def test_more_workers_serve_no_less():
    slo = Slo(ttft_s=0.15, tpot_s=0.01)
    met = []
    for num in (1, 2, 4):
        served = make_stack(0, num, slo=slo).run(drawn_entries(120, Shape(600, 20), 150))
        met.append(sum(request.met(slo) for request in served))
    assert met == sorted(met) and met[0] < met[-1]


def test_a_class_that_cannot_be_kept_is_refused():
    slo = Slo(ttft_s=0.05)
    stack = make_stack(slo=slo)
    served = stack.run(drawn_entries(400, Shape(1200, 8), 80))
    check(stack, served)
    refused = {request.refused for request in served} - {""}
    assert refused and refused <= {"TTFT_BUDGET", "TPOT_BUDGET", "QUEUE_FULL"}


def test_who_waits_too_long_is_refused_and_gives_its_credit_back():
    stack = make_stack(1, 1, max_num_seqs=4, num_blocks=200)
    served = stack.run([TraceEntry(0.001 * number, 1200, 400) for number in range(200)])
    check(stack, served)
    assert "QUEUE_WAIT" in {request.refused for request in served}


def test_prefixes_that_a_trace_shares_are_not_read_again():
    shared = [TraceEntry(0.5 * number, 1100, 8, (1, 2)) for number in range(6)]
    stack = make_stack(1, 1)
    served = stack.run(shared)
    check(stack, served)
    assert all(request.num_cached >= 960 for request in served[1:])
    assert served[0].num_cached == 0 and served[-1].ttft_s < 0.5 * served[0].ttft_s


def test_a_closed_loop_keeps_its_number():
    stack = make_stack(1, 1, concurrency=4)
    served = stack.run([TraceEntry(0.0, 100, 10)] * 20)
    check(stack, served)
    begun, ended = sorted(r.entry.at_s for r in served), sorted(r.last_s for r in served)
    for number in range(4, 20):
        assert begun[number] == pytest.approx(ended[number - 4], abs=1e-4)


def test_processes_of_one_host_share_its_cores():
    load = drawn_entries(10, Shape(600, 30), 40)
    alone, shared = (sum(r.e2e_s for r in make_stack(2, 2, cores=cores).run(load)) for cores in (64, 1))
    assert shared > 1.5 * alone


def test_every_rank_of_a_worker_takes_its_cores():
    load = drawn_entries(10, Shape(600, 30), 40)
    alone, shared = (sum(r.e2e_s for r in make_stack(0, 2, cores=cores, degree=4).run(load)) for cores in (64, 2))
    assert shared > 1.5 * alone


def test_names_of_spans_are_equal_as_far_as_prefixes_are():
    first, second = (span_names(TraceEntry(0, 1200, 1, ids), number) for number, ids in enumerate(((7, 8), (7, 9))))
    assert len(first) == 1200 // 64 and first[:8] == second[:8] and first[8] != second[8]
    assert first[16:] != second[16:], "behind what the trace names prompts are their own"
    assert not span_names(TraceEntry(0, 1200, 1), 0)


@pytest.mark.parametrize("name", [name for name, shape in WORKLOADS.items() if shape.shared])
def test_requests_of_a_workload_share_as_many_tokens_as_it_says(name):
    shape = WORKLOADS[name]
    first, second = drawn_entries(1, shape, 2)
    names = zip(span_names(first, 0), span_names(second, 1), strict=False)
    num_equal = sum(one == other for one, other in names)
    assert num_equal == min(shape.shared, first.num_prompt, second.num_prompt) // 64


def test_a_trace_comes_as_fast_as_asked():
    entries = [TraceEntry(10.0 * number, 100, 0) for number in range(11)] + [TraceEntry(200, 5000, 10)]
    found = at_rate(fitting(entries, 2048), 4.0)
    assert len(found) == 11 and found[-1].at_s == pytest.approx(11 / 4) and found[0].num_output == 1
    with pytest.raises(ValueError, match="1 of 2 requests fit into a context of 90"):
        fitting([TraceEntry(0, 80, 2), TraceEntry(1, 100, 2)], 90)
