"""Counters of a fleet from what gateways say, the lease, and the loop that puts them together."""

import asyncio
import json
import math
import sys
import threading
import time
from pathlib import Path

import pytest

from baton.cli.main import main
from baton.cli.planning import scaler as scaler_command
from baton.cli.planning.model_flags import stored_form
from baton.engine.models.registry import read_spec
from baton.planning.scaling.counters import Placed
from baton.planning.scaling.lease import NAME, LeaderLease
from baton.planning.scaling.live import STARTS_S, WARM_S, FleetWatch, GatewayLook
from baton.planning.scaling.loop import ScalerLoop
from baton.planning.scaling.scaler import Scaler, ScalerBounds
from baton.service.security.access import Access
from baton.service.slo import Slo
from baton.v1 import fleet_pb2 as pb
from baton.v1 import inference_pb2, worker_pb2
from tests.planning.scaling.flat_model import FlatModel
from tests.support.model_folders import quantized_folders
from tests.support.pace import patience
from tests.support.process import Process
from tests.support.redis_server import RedisServer

TARGET = Path(__file__).resolve().parents[3] / "demo" / "target"


def worker(number, role="decode", state="serving", num_running=0, load_state="serving") -> pb.WorkerView:
    load = worker_pb2.Load(num_running=num_running, state=load_state)
    return pb.WorkerView(address=f"10.0.0.{number}:1", role=role, state=state, load=load)


def look(
    workers=(), ended=0, running=0, prompt=0, output=0, uptime=100.0, recent=(), waiting=0, refused=0
) -> GatewayLook:
    requests = pb.ListRequestsResponse(
        num_ended=ended, num_running=running, num_input_tokens=prompt, num_output_tokens=output, uptime_s=uptime,
        recent=recent, num_waiting=waiting, num_answered=ended - refused,
    )  # fmt: skip
    return GatewayLook(pb.ListWorkersResponse(workers=workers), requests)


def answered(prompt=1000, cached=0, output=100, prefill_s=0.05, tpot_s=0.02, ttft_s=0.2, ended_s=5.0) -> pb.RequestView:
    timing = inference_pb2.Timing(prefill_s=prefill_s, tpot_s=tpot_s, ttft_s=ttft_s)
    return pb.RequestView(
        outcome="ok", prompt_tokens=prompt, cached_tokens=cached, output_tokens=output, timing=timing, ended_s=ended_s
    )


def test_what_came_since_the_last_look():
    watch = FleetWatch(FlatModel())
    two = [worker(1), worker(2, "prefill")]
    assert watch.note({"a": look(two, 100, 5, 1000, 100)}, 0) is None
    seen = watch.note({"a": look(two, 160, 5, 61000, 6100, uptime=160, recent=[answered(cached=250)], waiting=3)}, 60)
    assert seen.requests_per_s == 1.0 and seen.output_tokens == 100 and seen.num_waiting == 3
    assert seen.prompt_tokens == pytest.approx(1000 * 0.75), "what a cache holds nobody reads"
    assert seen.ttft_p95_s == 0.2 and seen.serving == {"prefill": 1, "decode": 1}
    assert seen.read_ratio == pytest.approx(0.05 / (750 / 20_000)) and seen.write_ratio == pytest.approx(1.0)


def test_what_is_refused_comes_and_makes_no_request_shorter():
    """The more was refused, the fewer workers were asked for."""
    watch = FleetWatch(FlatModel())
    watch.note({"a": look()}, 0)
    seen = watch.note({"a": look(ended=60, refused=42, prompt=18_000, output=1800, uptime=160)}, 60)
    assert seen.requests_per_s == 1.0 and (seen.prompt_tokens, seen.output_tokens) == (1000, 100)
    scaler = Scaler(FlatModel(), ScalerBounds(), Slo(), 60)
    before = scaler.decide(seen)
    seen = watch.note({"a": look(ended=120, refused=102, prompt=18_000, output=1800, uptime=220)}, 120)
    assert scaler.decide(seen) == before, "where all was refused, the lengths are the last that are known"


@pytest.mark.parametrize("state", ["draining", "left"])
def test_a_placed_worker_that_drains_to_restart_counts_as_starting(state):
    """Another was started beside it, for each drain that took longer than a look."""
    watch = FleetWatch(FlatModel())
    placed = [Placed("decode", worker(number).address) for number in (1, 2)]
    watch.note({"a": look([worker(1), worker(2)])}, 0)
    seen = watch.note({"a": look([worker(1), worker(2, state=state)], uptime=160)}, 60)
    seen = watch.with_placed(seen, placed)
    assert (seen.serving["decode"], seen.starting["decode"]) == (1, 1)


def test_gateways_are_added_up_and_workers_count_once():
    watch = FleetWatch(FlatModel())
    both = {"a": look([worker(1)]), "b": look([worker(1, state="connecting"), worker(2)])}
    watch.note(both, 0)
    seen = watch.note(
        {"a": look([worker(1)], 30, prompt=1, uptime=160), "b": look([worker(1), worker(2)], 30, uptime=160)}, 60
    )
    assert seen.requests_per_s == 1.0 and seen.serving["decode"] == 2


@pytest.mark.parametrize("prompt", [0, 30_000])
def test_a_gateway_that_answered_nothing_changes_no_length(prompt):
    """It has refused all; or it is of an older version, and does not say how many it has answered."""
    watch = FleetWatch(FlatModel())
    watch.note({"a": look(), "b": look()}, 0)
    both = {
        "a": look(ended=60, prompt=60_000, output=6000, uptime=160),
        "b": look(ended=60, refused=60, prompt=prompt, uptime=160),
    }
    seen = watch.note(both, 60)
    assert seen.requests_per_s == 2.0 and (seen.prompt_tokens, seen.output_tokens) == (1000, 100)


def test_a_worker_that_was_drained_does_not_start_for_ever():
    """Gateways go on dialling an address that they were given."""
    watch = FleetWatch(FlatModel())
    gone, new = worker(1, state="connecting"), worker(3, state="connecting")
    watch.note({"a": look([worker(1), worker(2)])}, 0)
    starting = [watch.note({"a": look([gone, worker(2), new])}, 60 * n).starting["decode"] for n in range(1, 14)]
    assert starting == [1] * 10 + [0] * 3, "the new one alone, and not for ever"


def test_a_gateway_that_began_again_counts_from_its_start():
    watch = FleetWatch(FlatModel())
    watch.note({"a": look(ended=1000, running=50, prompt=10**6, uptime=5000)}, 0)
    seen = watch.note({"a": look(ended=12, prompt=1200, output=120, uptime=20)}, 60)
    assert seen.requests_per_s == 0.2 and seen.prompt_tokens == 100


def test_a_fleet_that_does_not_answer_is_unknown_and_not_idle():
    watch = FleetWatch(FlatModel())
    watch.note({"a": look()}, 0)
    assert watch.note({"a": None}, 60) is None


def test_a_gateway_that_misses_a_look_counts_from_the_one_before():
    watch = FleetWatch(FlatModel())
    watch.note({"a": look(), "b": look()}, 0)
    seen = watch.note({"a": look(ended=60, uptime=160), "b": None}, 60)
    assert seen.requests_per_s == 1.0 and seen.num_silent == 1
    seen = watch.note({"a": look(ended=120, uptime=220), "b": look(ended=120, uptime=220)}, 120)
    assert seen.requests_per_s == 2.0 and seen.num_silent == 0


def test_an_only_gateway_that_misses_a_look_costs_one_decision():
    watch = FleetWatch(FlatModel())
    watch.note({"a": look()}, 0)
    watch.note({"a": None}, 60)
    assert watch.note({"a": look(ended=240, uptime=220)}, 120).requests_per_s == 2.0


@pytest.mark.parametrize("asked", [{"a": None}, {"name": None}, {}], ids=["silent", "no such name", "other devices"])
def test_a_look_without_answers_forgets_nobody(asked):
    """Those that serve counted as starting for two minutes, those that are gone for ten."""
    watch = FleetWatch(FlatModel())
    both = [worker(1), worker(2, state="connecting"), worker(3, "prefill")]
    watch.note({"a": look(both)}, 0)
    watch.note({"a": look([*both, worker(4, state="connecting")], uptime=160)}, 60)
    assert watch.note(asked, 120) is None
    late = answered(ended_s=100.0, ttft_s=0.7)
    seen = watch.note({"a": look([*both, worker(4, state="connecting")], 120, uptime=280, recent=[late])}, 180)
    assert seen.serving == {"prefill": 1, "decode": 1} and seen.starting == {"prefill": 0, "decode": 1}
    assert (seen.requests_per_s, seen.ttft_p95_s) == (1.0, 0.7), "since the last look that was answered"


def test_a_placed_worker_counts_from_the_start():
    """Gateways know its address, which told nothing: another was started beside it."""
    watch = FleetWatch(FlatModel())
    there = [worker(1), worker(2, state="connecting"), worker(3, state="connecting")]
    watch.note({"a": look(there)}, 0)
    seen = watch.note({"a": look(there, uptime=160)}, 60)
    seen = watch.with_placed(seen, [Placed("decode", worker(number).address) for number in (1, 2)])
    assert (seen.serving["decode"], seen.starting["decode"]) == (1, 1)


def test_a_placed_worker_that_hangs_counts_no_more():
    """Its launcher sees a process, and no gateway a session: it counted as starting for ever."""
    watch = FleetWatch(FlatModel())
    placed = [Placed("decode", worker(number).address) for number in (1, 2)]
    watch.note({"a": look([worker(1), worker(2)])}, 0)
    there = [worker(1), worker(2, state="connecting")]
    counts = []
    for at in (60, 60 + STARTS_S / 2, 60 + STARTS_S):
        seen = watch.with_placed(watch.note({"a": look(there, uptime=100 + at)}, at), placed)
        counts.append((seen.serving["decode"], seen.starting["decode"]))
    assert counts == [(1, 1), (1, 1), (1, 0)]
    seen = watch.note({"a": look([worker(1), worker(2)], uptime=1000)}, 900)
    assert watch.with_placed(seen, placed).starting["decode"] == 1, "it is back, and not warm yet"


def test_a_rate_is_by_its_gateways_clock():
    """That of the scaler stands still while its host is suspended: an hour's requests were those of a minute."""
    watch = FleetWatch(FlatModel())
    watch.note({"a": look(uptime=100)}, 0)
    assert watch.note({"a": look(ended=7320, uptime=3760)}, 60).requests_per_s == 2.0


def test_new_workers_count_as_starting_until_they_are_warm():
    watch = FleetWatch(FlatModel())
    watch.note({"a": look([worker(1)])}, 0)
    seen = watch.note(
        {"a": look([worker(1), worker(2), worker(3, state="connecting"), worker(4, load_state="compiling")])}, 60
    )
    assert seen.serving["decode"] == 1 and seen.starting["decode"] == 3
    seen = watch.note({"a": look([worker(1), worker(2), worker(5, state="draining")])}, 60 + WARM_S)
    assert seen.serving["decode"] == 2 and seen.starting["decode"] == 0


# ---- the lease ----


async def test_one_of_two_leads_until_it_goes(tmp_path):
    with RedisServer(tmp_path) as server:
        first, second = LeaderLease(server.url, "first"), LeaderLease(server.url, "second")
        assert await first.hold() and await first.hold() and not await second.hold()
        await first.release()
        assert await second.hold() and server.client.get(NAME) == b"second"
        await second.release()


async def test_a_lease_that_is_not_renewed_passes_on_and_stays_there(tmp_path):
    with RedisServer(tmp_path) as server:
        dead, next_one = LeaderLease(server.url, "dead", ttl_s=0.2), LeaderLease(server.url, "next")
        assert await dead.hold()
        for _ in range(200):
            if await next_one.hold():
                break
            await asyncio.sleep(0.02)
        assert await next_one.hold() and not await dead.hold()
        await dead.release()
        assert server.client.get(NAME) == b"next", "one that comes back late takes nothing away"
        await next_one.release()


async def test_without_redis_nobody_leads(tmp_path, caplog):
    with RedisServer(tmp_path) as server:
        lease = LeaderLease(server.url, "one")
        assert await lease.hold()
        server.kill()
        assert not await lease.hold() and not await lease.hold()
        assert caplog.text.count("Redis does not say who leads") == 1
        server.start()
        assert await lease.hold()
        server.client.delete(NAME)
        server.client.lpush(NAME, "of the wrong kind")
        assert not await lease.hold() and not await lease.hold()
        assert caplog.text.count("Redis does not say who leads") == 2
        await lease.release()


# ---- the loop ----


class Hands:
    """`all`: the workers that these hands have placed; None: nobody can say."""

    def __init__(self, workers=()):
        self.done, self.all = [], [Placed(each.role, each.address) for each in workers]

    async def placed(self):
        if self.all is None:
            raise ConnectionError("no launcher answers")
        return self.all

    async def start(self, role, number):
        self.done.append(("start", role, number))

    async def drain(self, address, next_role):
        if address == "10.0.0.9:1":
            raise ConnectionError("it is gone")
        self.done.append(("drain", address, next_role))


class Gateway:
    """One gateway whose counters advance by a minute at each look."""

    def __init__(self, monkeypatch, workers, rate):
        self.workers, self.rate, self.at = workers, rate, 0
        monkeypatch.setattr("baton.planning.scaling.loop.now", lambda: 60.0 * self.at)

    async def look(self):
        self.at += 1
        num = 60 * self.rate * self.at
        return {"a": look(self.workers, round(num), 0, round(2000 * num), round(100 * num), uptime=60 * self.at)}


def loop_of(gateway, **options):
    """One that knows the load of the last minutes."""
    told = []
    scaler = Scaler(FlatModel(), ScalerBounds({"prefill": 1, "decode": 1}), Slo(), 60)
    for history in scaler._roles.values():
        history.begun_at = -math.inf
    return ScalerLoop(scaler, FleetWatch(FlatModel()), gateway.look, told.append, **options), told


async def test_what_is_missing_is_started(monkeypatch):
    hands = Hands()
    loop, told = loop_of(Gateway(monkeypatch, [worker(1), worker(2, "prefill")], 20), performer=hands)
    assert await loop.turn() is None
    await loop.turn()
    assert hands.done == [("start", "prefill", 2), ("start", "decode", 1)]
    assert told[0].startswith("scale: start 2 prefill: ")


async def test_what_was_started_and_no_gateway_sees_yet_is_not_started_again(monkeypatch):
    """A model that loads for longer than a minute: its worker registers only afterwards."""
    there = [worker(1), worker(2, "prefill")]
    hands = Hands(there)
    loop, _ = loop_of(Gateway(monkeypatch, there, 20), performer=hands)
    for _ in range(2):
        await loop.turn()
    hands.all += [
        Placed("prefill", ""),
        Placed("prefill", ""),
        Placed("decode", "10.0.0.8:1"),
    ]  # not all have an address yet
    for _ in range(5):
        await loop.turn()
    assert hands.done == [("start", "prefill", 2), ("start", "decode", 1)]


async def test_nothing_is_changed_while_it_is_unknown_what_there_is(monkeypatch, caplog):
    hands = Hands()
    hands.all = None
    loop, told = loop_of(Gateway(monkeypatch, [worker(1), worker(2, "prefill")], 20), performer=hands)
    for _ in range(3):
        assert await loop.turn() is None
    assert not told and not hands.done and "no launcher answers" in caplog.text
    hands.all = []
    assert await loop.turn() is not None


async def test_a_worker_is_asked_once_where_a_role_changes_and_shrinks(monkeypatch):
    hands = Hands()
    workers = [worker(number, num_running=number) for number in range(1, 7)]
    loop, told = loop_of(Gateway(monkeypatch, [*workers, worker(7, "prefill")], 20), performer=hands)
    for _ in range(2):
        await loop.turn()
    assert told[0].startswith("scale: change 2 decode into prefill: ") and "drain 2 decode" in told[0]
    assert hands.done == [
        ("drain", "10.0.0.1:1", "prefill"), ("drain", "10.0.0.2:1", "prefill"),
        ("drain", "10.0.0.3:1", ""), ("drain", "10.0.0.4:1", ""),
    ]  # fmt: skip


async def test_without_apply_it_is_told_once(monkeypatch):
    loop, told = loop_of(Gateway(monkeypatch, [worker(1), worker(2, "prefill")], 20))
    for _ in range(4):
        await loop.turn()
    assert len(told) == 1 and told[0].startswith("would scale: start 2 prefill")


async def test_those_that_are_idle_go_first_and_one_failure_is_not_the_end(monkeypatch, caplog):
    hands = Hands()
    workers = [worker(1, num_running=9), worker(2, num_running=1), worker(9), worker(3, "prefill")]
    gateway = Gateway(monkeypatch, workers, 0)
    loop, _ = loop_of(gateway, performer=hands)
    for _ in range(2):
        await loop.turn()
    assert hands.done == [("drain", "10.0.0.2:1", ""), ("drain", "10.0.0.1:1", "")]
    assert "it is gone" in caplog.text


async def test_one_that_does_not_lead_only_looks(monkeypatch):
    hands = Hands()
    loop, told = loop_of(Gateway(monkeypatch, [worker(1), worker(2, "prefill")], 20), performer=hands)
    for _ in range(3):
        assert await loop.turn(leads=False) is None
    assert not told and not hands.done
    assert (await loop.turn()).wanted["prefill"] == 3, "and leads at once with what it has seen"


async def test_nothing_is_changed_by_a_lease_that_lapsed_while_it_looked(monkeypatch):
    """A look reads a model's files, where workers say another dtype: that may take longer than the lease."""

    class LapsedLease:
        async def hold(self):
            return False

    hands = Hands()
    loop, told = loop_of(
        Gateway(monkeypatch, [worker(1), worker(2, "prefill")], 20), performer=hands, lease=LapsedLease()
    )
    for _ in range(3):
        assert await loop.turn() is None
    assert not told and not hands.done


async def test_nobody_is_asked_without_the_lease(monkeypatch):
    """Each that does not answer takes up to ten seconds: another scaler that led by then asked the same workers."""

    class ShortLease:
        num_left = 4

        async def hold(self):
            self.num_left -= 1
            return self.num_left > 0

    hands = Hands()
    workers = [*(worker(number, num_running=number) for number in range(1, 7)), worker(7, "prefill")]
    loop, _ = loop_of(Gateway(monkeypatch, workers, 0), performer=hands, lease=ShortLease())
    for _ in range(2):
        await loop.turn()
    assert [address for _, address, _ in hands.done] == ["10.0.0.1:1", "10.0.0.2:1"]


# ---- the command ----


def test_a_dry_run_prints_the_day(capsys, tmp_path):
    picture = tmp_path / "day.svg"
    argv = [
        "scaler",
        "--dry-run",
        "--model",
        "llama-3.1-8b",
        "--device",
        "H100",
        "--load",
        "60,1000,200",
        "--picture",
        str(picture),
    ]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "worker-hours" in out and "of an oracle" in out and len(out.splitlines()) == 26
    assert picture.read_text().startswith("<svg")


def of_dtype(number: int, dtype: str, kv_dtype: str) -> pb.WorkerView:
    view = worker(number)
    view.hello.model.MergeFrom(worker_pb2.ModelCard(dtype=dtype, kv_dtype=kv_dtype))
    return view


@pytest.mark.parametrize("folder_dtype", ["float32", "bfloat16"])
def test_steps_are_those_of_the_dtypes_that_workers_say(folder_dtype, tmp_path, monkeypatch, capsys):
    """And until one has said it, of the folder's own, in which they compute by default."""
    config = json.loads((TARGET / "config.json").read_text()) | {"dtype": folder_dtype}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fleets = [[worker(1)], [of_dtype(1, "fp32", "int8")], [of_dtype(1, "bf16", "bf16"), worker(2)], [], None]
    seen: list[tuple[str, float]] = []

    async def look_at(target, access):
        return None if (workers := fleets.pop(0)) is None else look(workers)

    async def run(loop: ScalerLoop):
        model = loop._scaler._model
        while fleets:
            seen.append((model.times.roofs.form, model.times.kv_token_bytes))
            await loop._look()
        seen.append((model.times.roofs.form, model.times.kv_token_bytes))

    monkeypatch.setattr(scaler_command, "_look", look_at)
    monkeypatch.setattr(ScalerLoop, "run", run)
    assert main(["scaler", "--target", "x:1", "--model", str(tmp_path), "--device", "H100"]) == 0
    spec = read_spec(tmp_path)
    own, int8, bf16 = (spec.kv_layout(form, 64).block_bytes / 64 for form in (spec.dtype, "int8", "bf16"))
    first = ("fp32" if folder_dtype == "float32" else "none", own)
    assert seen == [first, first, ("fp32", int8), *[("none", bf16)] * 3]


@pytest.mark.parametrize(
    ("given", "devices", "told"),
    [
        ([], ["NVIDIA H100 80GB HBM3"], "workers compute on NVIDIA H100 80GB HBM3, and --device is cpu"),
        (
            ["--device", "H100"],
            ["AMD EPYC, avx512+vnni"],
            "workers compute on AMD EPYC, avx512+vnni, and --device is H100",
        ),
        ([], ["NVIDIA L4", "AMD EPYC, avx512", "NVIDIA L40S"], "workers compute on NVIDIA L4, and --device is cpu"),
        ([], ["AMD EPYC, avx512+vnni", "", "NVIDIA L4", "AMD EPYC, avx512+vnni"], ""),
        (["--device", "H100"], ["NVIDIA H100 PCIe"], ""),
        (["--device", "H100"], [""], ""),
    ],
)
def test_nothing_is_decided_by_steps_of_what_workers_do_not_compute_on(given, devices, told, monkeypatch, capsys):
    """A fleet of GPUs was planned as this machine's CPU, and scaled to its bounds."""
    looks = []

    async def look_at(target, access):
        views = [worker(number) for number in range(len(devices))]
        for view, device in zip(views, devices, strict=True):
            view.hello.model.device = device
        return look(views)

    async def run(loop: ScalerLoop):
        looks.append(await loop._look())

    monkeypatch.setattr(scaler_command, "_look", look_at)
    monkeypatch.setattr(ScalerLoop, "run", run)
    assert main(["scaler", "--target", "x:1", *given]) == 0
    said = capsys.readouterr().err
    assert bool(looks[0]) is not bool(told)
    assert said == (f"baton scaler: nothing is decided: {told}\n" if told else "")


def test_files_that_cannot_be_read_any_more_are_told_and_steps_stay(tmp_path, monkeypatch, capsys):
    """They are read beside the loop, which renews the lease and takes Ctrl-C meanwhile."""
    quantized_folders.dense_folder(tmp_path)
    quantized_folders.write_fp8(tmp_path, spread="row")
    weights = tmp_path / "model.safetensors"
    capsys.readouterr()
    fleets = [[of_dtype(1, "bf16", "bf16")] for _ in range(4)]
    seen, threads, is_away = [], set(), threading.Event()

    async def look_at(target, access):
        return look(fleets.pop(0))

    async def run(loop: ScalerLoop):
        model, stored = loop._scaler._model, weights.read_bytes()
        first = model.times
        monkeypatch.setattr(scaler_command, "stored_form", noted)
        failures = (weights.unlink, lambda: weights.write_bytes(stored[:-9]), is_away.set)
        for change in (*failures, lambda: (is_away.clear(), weights.write_bytes(stored))):
            change()
            await loop._look()
            seen.append(model.times is first)

    def noted(*arguments):
        threads.add(threading.current_thread())
        if is_away.is_set():
            raise OSError("model.safetensors: stale file handle")
        return stored_form(*arguments)

    monkeypatch.setattr(scaler_command, "_look", look_at)
    monkeypatch.setattr(ScalerLoop, "run", run)
    assert main(["scaler", "--target", "x:1", "--model", str(tmp_path), "--device", "H100"]) == 0
    told = capsys.readouterr().err
    assert seen == [True, True, True, False], told
    assert threading.main_thread() not in threads
    assert told.count("\n") == 3 and told.count("baton scaler: ") == 3 and "model.safetensors" in told


def test_a_name_is_a_gateway_at_each_of_its_addresses(tmp_path, monkeypatch):
    """As that of a headless Service: they come and go. One without any is asked by its name, which says what is
    wrong."""
    (tmp_path / "config.json").write_bytes((TARGET / "config.json").read_bytes())
    names = [["10.0.0.1:2", "10.0.0.2:2"], ["10.0.0.2:2", "10.0.0.3:2"], []]
    asked, seen = [], []

    async def addresses_of(host, port):
        if host == "gateways":
            if not (found := names.pop(0)):
                raise OSError("Name or service not known")
            return found
        return [f"{host}:{port}"]

    async def look_at(target, access):
        asked[-1].append(target)
        return look([worker(1)])

    async def run(loop: ScalerLoop):
        for _ in range(3):
            asked.append([])
            seen.append([*await loop._look()])

    monkeypatch.setattr("gateway.discovery.dns.addresses_of", addresses_of)
    monkeypatch.setattr(scaler_command, "_look", look_at)
    monkeypatch.setattr(ScalerLoop, "run", run)
    targets = ["--target", "gateways:2", "--target", "10.0.0.2:2"]
    assert main(["scaler", *targets, "--model", str(tmp_path), "--device", "H100"]) == 0
    assert asked == seen == [["10.0.0.1:2", "10.0.0.2:2"], ["10.0.0.2:2", "10.0.0.3:2"], ["10.0.0.2:2", "gateways:2"]]


def test_a_scaler_that_is_told_to_end_gives_its_lease_up(tmp_path):
    """It had no handler for SIGTERM: as the first process of its pod it went on for 30 s, elsewhere it left its
    lease."""
    with RedisServer(tmp_path) as server:
        options = ["--target", "127.0.0.1:9", "--model", "llama-3.1-8b", "--device", "H100", "--redis"]
        scaler = Process("scaler", [sys.executable, "-m", "baton.cli", "scaler", *options, server.url], tmp_path)
        try:
            deadline = time.monotonic() + patience(60)
            while not server.client.exists(NAME):
                assert scaler.alive and time.monotonic() < deadline, scaler.text()
                time.sleep(0.05)
            scaler.terminate()
            assert scaler.wait(20) == 0, scaler.text()
            assert not server.client.exists(NAME)
        finally:
            scaler.stop()


async def test_certificates_that_cannot_be_read_at_a_look_are_told(tmp_path, capsys):
    """As while they are replaced. The scaler ended then."""
    assert await scaler_command._look("127.0.0.1:1", Access(tls_ca=tmp_path / "ca.crt")) is None
    told = capsys.readouterr().err
    assert told.startswith("baton scaler: 127.0.0.1:1: ") and "ca.crt" in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--target HOST:PORT is needed"),
        (["--dry-run", "--apply"], "--dry-run asks no gateway"),
        (["--target", "x:1", "--trace", "x.csv"], "--trace and --picture are for --dry-run"),
        (["--dry-run", "--decode", "0-4"], "decode workers: at least 1"),
        (["--dry-run", "--prefill", "4"], "--prefill 4: MIN-MAX"),
        (["--dry-run", "--load", "many"], "--load many: three numbers"),
        (["--dry-run", "--load", "inf,1000,200"], "--load inf,1000,200: three numbers"),
        (["--dry-run", "--load", "100,nan,200"], "--load 100,nan,200: three numbers"),
        (["--dry-run", "--device", "TPU"], "device 'TPU': one of"),
        (["--dry-run", "--model", "nowhere"], "nowhere: no such model folder"),
        (["--dry-run", "--quantization", "fp8"], "computes no fp8"),
    ],
)
def test_wrong_use_is_told_in_one_line(options, words, capsys):
    assert main(["scaler", *options]) == 2
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1
