"""The GPU's launcher with the device replaced: its steps in flight, its graphs and buffers, layers as they pass, and a
share of the multiprocessors."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from baton.engine import kernels
from baton.engine.attention import triton_paged
from baton.engine.core.config import EngineConfig
from baton.engine.core.device import MultiprocessorShare
from baton.engine.core.pooling import Pooling, PoolingParams
from baton.engine.core.request import Progress
from baton.engine.engine import Engine
from baton.engine.execute import launcher, step_memory, watermark
from baton.engine.execute.graphs import AgreedCapture
from baton.engine.execute.launcher import GpuLauncher
from baton.engine.execute.warm_up import warm_steps
from baton.engine.execute.watermark import LayerEvents
from baton.engine.parallel.collectives import RankLost
from baton.engine.sampling.on_device import DeviceSampler
from tests.support.engine.collector import run_to_end
from tests.support.engine.graphs import replay_by_computing
from tests.support.engine.toy_engine import engine_request, toy_engine
from tests.support.model_folders.families import make_few_heads, random_ids

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the real device is tested by test_gpu_engine.py"),
    pytest.mark.skipif(kernels.INTERPRETED is False, reason="Triton's interpreter is off in this process"),
]


class Event:
    """Passed once it is waited for."""

    def record(self, stream=None) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launcher, "chunk_sizes", lambda most: [])  # of 64 rows and more: seconds in the interpreter
    monkeypatch.setattr(launcher, "CudaCapture", lambda stream: replay_by_computing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(synchronize=lambda: None))


def test_an_engine_that_overlaps_in_graphs_gives_the_tokens_of_one_that_does_not(tmp_path, device):
    """Both in the interpreter; the steps in graphs take tokens that the host has not read from the place where they
    were drawn."""
    make_few_heads(tmp_path)
    config = EngineConfig(
        tmp_path, device="cpu", attention="triton", block_size=16, num_blocks=8, max_num_seqs=2, max_model_len=64,
        max_num_batched_tokens=66,
    )  # fmt: skip
    sampled = dict(temperature=0.9, seed=3, top_p=0.9)
    requests = [
        engine_request("greedy", random_ids(9, 1), 6),
        engine_request("sampled", random_ids(14, 2), 4, **sampled),
    ]
    plain, over = Engine.load(config), Engine.load(config)
    made = over.runner.launcher = GpuLauncher(over.runner.model, over.pool, over.config, False)
    assert made.overlaps and made.num_graphs == 2
    launches = []
    launch = made.launch
    made.launch = lambda batch, *given: launches.append(batch.token_ids) or launch(batch, *given)
    wanted, found = run_to_end(plain, requests), run_to_end(over, requests)
    assert {key: record.answer() for key, record in found.items()} == {key: r.answer() for key, r in wanted.items()}
    assert sum(bool((ids < 0).all()) for ids in launches) > 2


def small_engine(folder) -> Engine:
    make_few_heads(folder)
    config = EngineConfig(
        folder, device="cpu", attention="triton", block_size=16, num_blocks=8, max_num_seqs=4, max_model_len=64,
        max_num_batched_tokens=68,
    )  # fmt: skip
    return Engine.load(config)


def test_the_warm_up_waits_for_what_lies_in_the_buffers(tmp_path, device, monkeypatch):
    """There are two for the inputs of steps: a third one would be written where the first is still copied from."""
    monkeypatch.setattr(launcher, "warm_steps", lambda *sizes: warm_steps(*sizes)[:3])
    engine = small_engine(tmp_path)
    made = GpuLauncher(engine.runner.model, engine.pool, engine.config, False)
    done, send, wait = [], made._inputs.send, made.wait
    monkeypatch.setattr(made._inputs, "send", lambda *given: done.append("send") or send(*given))
    monkeypatch.setattr(made, "wait", lambda: done.append("wait") or wait())
    made.warm_up(engine.config)
    assert done.count("send") == 3 and "send send send" not in " ".join(done)


def test_a_prompt_alone_is_read_in_a_graph(tmp_path, device, monkeypatch):
    monkeypatch.setattr(launcher, "chunk_sizes", lambda most: [16])
    monkeypatch.setattr(triton_paged, "FEW_QUERIES", 1)
    make_few_heads(tmp_path)
    config = EngineConfig(
        tmp_path, device="cpu", attention="triton", block_size=16, num_blocks=4, max_num_seqs=1, max_model_len=64
    )
    requests = [engine_request("alone", random_ids(11, 1), 3)]
    plain, engine = Engine.load(config), Engine.load(config)
    made = engine.runner.launcher = GpuLauncher(engine.runner.model, engine.pool, engine.config, False)
    shapes, run_graph = [], made._graphs.run
    made._graphs.run = lambda batch, shape, *before: shapes.append(shape) or run_graph(batch, shape, *before)
    wanted, found = run_to_end(plain, requests), run_to_end(engine, requests)
    assert found["alone"].answer() == wanted["alone"].answer()
    assert [(shape.num_tokens, shape.num_rows) for shape in shapes] == [(16, 1), (1, 1), (1, 1)]


def test_what_is_asked_of_each_token_of_a_prompt_is_read_in_no_graph(tmp_path, device, monkeypatch):
    """A graph leaves the rows alone that logits are wanted of."""
    monkeypatch.setattr(launcher, "chunk_sizes", lambda most: [16])
    monkeypatch.setattr(triton_paged, "FEW_QUERIES", 1)
    make_few_heads(tmp_path)
    config = EngineConfig(
        tmp_path, device="cpu", attention="triton", block_size=16, num_blocks=4, max_num_seqs=1, max_model_len=64
    )
    mean = PoolingParams(Pooling.MEAN)
    requests = [
        engine_request("asked", random_ids(11, 1), 1, prompt_logprobs=2),
        engine_request("pooled", random_ids(11, 1), 0, named=False, pooling=mean),
    ]
    plain, engine = Engine.load(config), Engine.load(config)
    made = engine.runner.launcher = GpuLauncher(engine.runner.model, engine.pool, engine.config, False)
    monkeypatch.setattr(made._graphs, "run", None)
    for request in requests:
        wanted, found = (run_to_end(each, [request])[request.key].first for each in (plain, engine))
        assert (found.prompt_logprobs, found.pooled) == (wanted.prompt_logprobs, wanted.pooled)
        assert found.prompt_logprobs or found.pooled


def test_a_step_that_draws_nothing_asks_for_no_logits(tmp_path, device):
    """A kernel for one row reads that row, of no rows too: an illegal access, behind which the worker ends."""
    make_few_heads(tmp_path)
    config = EngineConfig(
        tmp_path, device="cpu", attention="triton", block_size=16, num_blocks=8, max_num_seqs=1, max_model_len=128,
        max_num_batched_tokens=65,
    )  # fmt: skip
    engine, rows = Engine.load(config), []
    model, head = engine.runner.model, engine.runner.model.head
    engine.runner.launcher = GpuLauncher(model, engine.pool, engine.config, False)
    model.head = lambda x: rows.append(len(x)) or head(x)
    last = PoolingParams(Pooling.LAST)
    run_to_end(engine, [engine_request("chunks", random_ids(70, 1), 2)])
    assert rows and 0 not in rows
    rows.clear()
    run_to_end(engine, [engine_request("pooled", random_ids(11, 1), 0, named=False, pooling=last)])
    assert not rows


def test_steps_that_cannot_be_captured_run_all_the_same(tmp_path, device, monkeypatch, caplog):
    def refuse(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(launcher, "CudaCapture", lambda stream: refuse)
    make_few_heads(tmp_path)
    config = EngineConfig(
        tmp_path, device="cpu", attention="triton", block_size=16, num_blocks=8, max_num_seqs=2, max_model_len=64
    )
    requests = [engine_request("greedy", random_ids(9, 1), 3)]
    plain, eager = Engine.load(config), Engine.load(config)
    made = eager.runner.launcher = GpuLauncher(eager.runner.model, eager.pool, eager.config, False)
    assert made.num_graphs == 0 and "without CUDA graphs: operation not permitted" in caplog.text
    wanted, found = run_to_end(plain, requests), run_to_end(eager, requests)
    assert found["greedy"].answer() == wanted["greedy"].answer()


def test_graphs_leave_their_outputs_in_one_buffer(tmp_path, device, monkeypatch):
    """Logits of every size of the ladder took 1.4 GB at 256 sequences, behind the pool."""
    outputs = []
    monkeypatch.setattr(
        launcher,
        "CudaCapture",
        lambda stream: lambda run_to_end: (lambda: None, outputs.append(run_to_end()) or outputs[-1]),
    )
    make_few_heads(tmp_path)
    config = EngineConfig(
        tmp_path, device="cpu", attention="triton", block_size=16, num_blocks=8, max_num_seqs=4, max_model_len=64
    )
    engine = Engine.load(config)
    GpuLauncher(engine.runner.model, engine.pool, engine.config, False)
    assert len(outputs) == 3
    for index in range(2):
        assert len({each[index].untyped_storage().data_ptr() for each in outputs}) == 1


def test_what_steps_take_is_measured_with_the_draw_and_the_graphs(tmp_path, device, monkeypatch):
    """Each is allocated behind the pool: the scores of a top_p draw of all rows, and what the largest graph keeps."""
    engine = small_engine(tmp_path)
    drawn, graphs, allocated = [], [], iter([100, 5, 200, 70])
    monkeypatch.setattr(launcher, "chunk_sizes", lambda most: [most])
    draw = SimpleNamespace(draw=lambda logits, rows: drawn.append((logits.shape[0], rows[0].params.top_p)))
    monkeypatch.setattr(step_memory, "sampler_on", lambda device: draw)
    monkeypatch.setattr(step_memory, "StepGraphs", lambda *given: graphs.append(given[3:7]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(allocated))
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    with torch.inference_mode():
        inputs = step_memory.StepInputs(torch.device("cpu"), step_memory.StepShape(68, 68, 4, 5)).num_bytes
        assert step_memory.step_bytes(engine.runner.model, engine.config, False) == 105 + inputs
        assert step_memory.step_bytes(engine.runner.model, engine.config, True) == 270 + inputs
    assert drawn == [(4, 0.9)] * 2 and graphs == [
        ([1, 2, 4], [1], [64], 64),
        ([1, 2, 4], [1, 2, 3, 4, 5, 9, 17], [64], 64),
    ]


def test_measuring_graphs_waits_for_what_lies_in_the_buffers(tmp_path, device, monkeypatch):
    """As the warm-up does: no capture waits there."""
    engine, done, send = small_engine(tmp_path), [], step_memory.StepInputs.send_padded
    monkeypatch.setattr(step_memory.StepInputs, "send_padded", lambda *given: done.append("send") or send(*given))
    monkeypatch.setattr(step_memory, "sampler_on", lambda device: SimpleNamespace(draw=lambda logits, rows: None))
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: done.append("wait"))
    with torch.inference_mode():
        step_memory.step_bytes(engine.runner.model, engine.config, False)
    assert done.count("send") == 4 and "send send send" not in " ".join(done)


def test_a_decode_step_waits_for_the_device_once(tmp_path, device, monkeypatch):
    """For the tokens of the step before, when they have landed; no operator in between asks the device for a value."""
    make_few_heads(tmp_path)
    config = EngineConfig(
        tmp_path, device="cpu", attention="triton", block_size=16, num_blocks=8, max_num_seqs=2, max_model_len=64
    )
    engine = Engine.load(config)
    launcher_made = engine.runner.launcher = GpuLauncher(engine.runner.model, engine.pool, engine.config, False)
    sampler = engine.runner.sampler = DeviceSampler()
    # Triton's interpreter asks for what a kernel would compute.
    monkeypatch.setattr(sampler._kernels, "draw", lambda logits, given, num_slots: logits.argmax(dim=1))
    waits: list[str] = []
    monkeypatch.setattr(Event, "synchronize", lambda self: waits.append("event"))
    monkeypatch.setattr(launcher_made, "wait", lambda: waits.append("stream"))

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._local_scalar_dense.default or "nonzero" in str(function):
                waits.append(str(function))
            return function(*args, **(kwargs or {}))

    sampled = dict(temperature=0.9, seed=3, top_p=0.9)
    for request in (engine_request("a", random_ids(9, 1), 12), engine_request("b", random_ids(7, 2), 12, **sampled)):
        engine.submit(request)
    steps = []
    while engine.has_work():
        before = engine.has_computed
        waits.clear()
        with Asked():
            engine.step()
        if before and engine.has_computed:
            steps.append(list(waits))
    assert len(steps) > 5 and all(step == ["event"] for step in steps[1:])
    assert steps[0] in ([], ["event"]), "two are in flight before the first is read"


def test_no_step_runs_under_a_torch_function_mode(monkeypatch):
    """With one, each attribute of a tensor goes through Python: three times the processor's time of an eager step."""
    engine = toy_engine()

    class Elsewhere:
        """The pool, on a device for which modes would be entered."""

        device = torch.device("meta")

        def __init__(self, pool):
            self._pool = pool

        def __getattr__(self, name):
            return getattr(self._pool, name)

    modes: list[int] = []
    engine.pool = engine.runner.pool = Elsewhere(engine.pool)
    engine.runner.model.before_forward = lambda batch: modes.append(len(_get_current_function_mode_stack()))
    run_to_end(engine, [engine_request("a", range(40), 5)])
    assert len(modes) == 5 and not any(modes)


def test_layers_are_told_when_their_events_have_passed():
    log = []

    class Logged(Event):
        def synchronize(self) -> None:
            log.append("passed")

    events = LayerEvents(Logged)
    for layer in range(3):
        events.record(layer)
    assert not log
    events.report(log.append)
    assert log == ["passed", 0, "passed", 1, "passed", 2]


def test_a_held_prompt_is_told_by_layers_behind_their_events(tmp_path, device, monkeypatch):
    monkeypatch.setattr(watermark, "MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(watermark, "MIN_BYTES", 0)
    make_few_heads(tmp_path, 2)
    engine = Engine.load(EngineConfig(tmp_path, device="cpu", attention="triton", num_blocks=8, max_num_seqs=1))
    engine.runner.launcher = GpuLauncher(engine.runner.model, engine.pool, engine.config, False)
    within: list[Progress] = []
    engine.on_progress = within.extend
    request = engine_request("held", random_ids(6, 1), 1)
    engine.admission.accept(request)
    assert engine.step() == [] and within == [], "it is launched"
    after = [output for output in engine.step() if isinstance(output, Progress)]
    assert within == [Progress(request.key, 6, layer + 1) for layer in range(2)]
    assert after == [Progress(request.key, 6, 2)]


# ---- a share of the multiprocessors ----


def h200(monkeypatch, create=None):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    if create is not None:
        from torch.cuda import green_contexts

        monkeypatch.setattr(green_contexts, "SUPPORTED", True)
        monkeypatch.setattr(green_contexts, "GreenContext", SimpleNamespace(create=create, Stream=None))


@pytest.mark.parametrize("share, num_sms", [(0.7, 96), (0.5, 64), (0.01, 8), (0.99, 128)])
def test_a_share_is_a_green_context(share, num_sms, monkeypatch):
    asked = []
    stream = SimpleNamespace()

    def create(**options):
        asked.append(options)
        return SimpleNamespace(Stream=lambda: stream)

    h200(monkeypatch, create)
    share_of_gpu = MultiprocessorShare(torch.device("cuda", 1), share)
    assert asked == [{"num_sms": num_sms, "device_id": 1}] and share_of_gpu.stream is stream
    assert share_of_gpu.summary == f"{num_sms} of 132 multiprocessors"


def test_where_there_are_none_it_is_one_line(monkeypatch):
    h200(monkeypatch)
    with pytest.raises(ValueError, match=r"^sm_share 0.5: torch .* was built without green contexts; leave it out$"):
        MultiprocessorShare(torch.device("cuda", 0), 0.5)

    def create(**options):
        raise RuntimeError("CUDA driver error:\n operation not supported")

    h200(monkeypatch, create)
    with pytest.raises(ValueError, match="no green contexts here .*not supported.*leave it out") as error:
        MultiprocessorShare(torch.device("cuda", 0), 0.5)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(sm_share=1.0), "sm_share 1: must be above 0 and below 1"),
        (dict(sm_share=0.0), "sm_share 0: must be above 0"),
        (dict(sm_share=0.5, device="cpu"), "sm_share has no effect on a CPU"),
    ],
)
def test_the_share_of_multiprocessors_is_checked(options, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig("m", **options)


def test_all_of_a_step_runs_in_its_stream():
    engine = toy_engine()
    inside: list[bool] = []

    class Stream:
        entered = False

        def __enter__(self):
            self.entered = True

        def __exit__(self, *_):
            self.entered = False

    stream = Stream()
    engine.runner.launcher.stream_context = lambda: stream
    engine.runner.model.before_forward = lambda batch: inside.append(stream.entered)
    run_to_end(engine, [engine_request("a", range(40), 5)])
    assert len(inside) == 5 and all(inside) and not stream.entered


def test_what_a_rank_cannot_capture_is_told_to_the_others_whatever_it_raises():
    """Triton's want of resources is no RuntimeError."""
    told = []

    def capture(run):
        raise run

    def least(number: int) -> int:
        told.append(number)
        return number

    with pytest.raises(RuntimeError, match="KeyError: 'shared memory'"):
        AgreedCapture(capture, least)(KeyError("shared memory"))
    with pytest.raises(RankLost):
        AgreedCapture(capture, least)(RankLost("rank 1 is gone"))
    assert told == [0]
