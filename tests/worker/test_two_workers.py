"""Two real workers with a real small model, driven over their sessions as a gateway does it."""

import asyncio
import json
import secrets
import shutil
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import failpoints
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.states import LegState
from tests.support.bare_engine import answer_alone
from tests.support.models import make_model
from tests.support.stack import SLOW_STEPS
from tests.support.worker.scripted import LegEnded, Session, make_spec, run_bounded, run_pair, run_worker, worker_prompt

VOCAB = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def slow(monkeypatch):
    """Slow steps down, so that a request still runs when a test acts on it."""
    monkeypatch.setattr(failpoints, "_board", failpoints._Board(SLOW_STEPS))


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_split_equals_whole(model, transport):
    async def main():
        async with run_pair(model, transports=(transport,)) as (pair, _, _):
            answer = await pair.generate("greedy", make_spec(worker_prompt(200), max_tokens=12))
            assert answer.fetched.transport == transport and answer.fetched.num_tokens == 200
            assert answer.fetched.num_bytes > 0 and answer.ended.decode.num_steps == 11
            assert (await pair.prefill.wait_ended("greedy")).code == 0
            seeded = await pair.generate(
                "seeded", make_spec(worker_prompt(130, 2), max_tokens=9, temperature=1.0, seed=7, n=3, top_k=50)
            )
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()
            return answer.token_ids, seeded.token_ids

    greedy, seeded = run_bounded(main)
    assert greedy == answer_alone(model, worker_prompt(200), 12)
    assert seeded == answer_alone(model, worker_prompt(130, 2), 9, temperature=1.0, seed=7, n=3, top_k=50)


def test_many_at_once(model):
    """More than a prefill worker accepts at once: the gateway tries again, as the refusal says."""

    async def one(pair, index):
        spec = make_spec(worker_prompt(40 + 13 * index, index), max_tokens=10)
        while True:
            try:
                return (await pair.generate(f"r{index}-{secrets.token_hex(2)}", spec)).token_ids
            except LegEnded as ended:
                assert isinstance(ended.event, pb.Refused), ended.event
                await pair.cancel(ended.event.key.request_id)
                await asyncio.sleep(ended.event.retry_after_ms / 1000)

    async def main():
        async with run_pair(model) as (pair, _, _):
            answers = await asyncio.gather(*(one(pair, index) for index in range(12)))
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()
            return answers

    for index, answer in enumerate(run_bounded(main)):
        assert answer == answer_alone(model, worker_prompt(40 + 13 * index, index), 10)


def test_prefix_hits_on_both_sides(model):
    async def main():
        async with run_pair(model) as (pair, _, _):
            first = await pair.generate("first", make_spec(worker_prompt(300), max_tokens=4))
            again = await pair.generate("again", make_spec(worker_prompt(300), max_tokens=4))
            longer = await pair.generate("longer", make_spec(worker_prompt(300) + worker_prompt(100, 9), max_tokens=4))
            assert first.token_ids == again.token_ids
            assert (again.granted.num_cached_tokens, again.accepted.num_cached_tokens) == (256, 256)
            assert again.fetched.num_tokens == 300 - 256 and again.fetched.num_bytes < first.fetched.num_bytes
            assert longer.granted.num_cached_tokens == 256
            return longer.token_ids

    assert run_bounded(main) == answer_alone(model, worker_prompt(300) + worker_prompt(100, 9), 4)


def test_only_the_window_crosses(model, tmp_path):
    """Of a model whose layers all see 40 tokens; and what has crossed is found again."""
    folder = Path(shutil.copytree(model, tmp_path / "windowed"))
    config = json.loads((folder / "config.json").read_text())
    config |= dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=40)
    (folder / "config.json").write_text(json.dumps(config))

    async def main():
        async with run_pair(folder) as (pair, _, _):
            first = await pair.generate("first", make_spec(worker_prompt(300), max_tokens=90))
            assert (first.granted.num_cached_tokens, first.fetched.num_tokens) == (0, 300 - 256)
            again = await pair.generate("again", make_spec(worker_prompt(300) + first.token_ids[0], max_tokens=20))
            assert again.granted.num_cached_tokens == 384 and again.fetched.num_tokens == 6
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()
            return first.token_ids, again.token_ids

    first, again = run_bounded(main)
    assert first == answer_alone(folder, worker_prompt(300), 90)
    assert again == answer_alone(folder, worker_prompt(300) + first[0], 20)


def test_of_layers_with_a_window_the_window_stays(model, tmp_path):
    """Every second layer sees 40 tokens: all crosses, the decode worker keeps parts of what these see, and finds them
    again."""
    folder = Path(shutil.copytree(model, tmp_path / "windowed"))
    config = json.loads((folder / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"] * config["num_hidden_layers"]
    config |= dict(architectures=["MinistralForCausalLM"], model_type="ministral", sliding_window=40)
    config["layer_types"] = kinds[: config["num_hidden_layers"]]
    (folder / "config.json").write_text(json.dumps(config))

    async def main():
        async with run_pair(folder) as (pair, _, decode):
            first = await pair.generate("first", make_spec(worker_prompt(300), max_tokens=90))
            assert (first.granted.num_cached_tokens, first.fetched.num_tokens) == (0, 300)
            again = await pair.generate("again", make_spec(worker_prompt(300) + first.token_ids[0], max_tokens=20))
            assert again.granted.num_cached_tokens == 384 and again.fetched.num_tokens == 6
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()
            assert decode.engine.ledger.num_ids > decode.engine.num_blocks
            return first.token_ids, again.token_ids

    first, again = run_bounded(main)
    assert first == answer_alone(folder, worker_prompt(300), 90)
    assert again == answer_alone(folder, worker_prompt(300) + first[0], 20)


def test_a_decode_worker_alone(model):
    async def main():
        async with run_pair(model) as (pair, _, _):
            answer = await pair.generate_here("local", make_spec(worker_prompt(150), max_tokens=10, logprobs=2))
            assert answer.done.prefill_s > 0 and answer.done.num_chunks == 1
            assert [len(entry.top) for entry in answer.logprobs[0]] == [2] * 10
            assert [entry.chosen.token_id for entry in answer.logprobs[0]] == answer.token_ids[0]
            assert answer.finish_reasons == {0: 2}
            await pair.decode.wait_idle()
            return answer.token_ids

    assert run_bounded(main) == answer_alone(model, worker_prompt(150), 10)


def test_the_first_token_may_be_the_last(model):
    async def main():
        async with run_pair(model) as (pair, _, _):
            answer = await pair.generate("one", make_spec(worker_prompt(100), max_tokens=1))
            assert len(answer.token_ids[0]) == 1 and answer.finish_reasons == {0: 2}
            assert (await pair.decode.wait_ended("one")).reason == "CANCELLED"
            local = await pair.generate_here("local", make_spec(worker_prompt(100), max_tokens=1))
            assert local.token_ids == answer.token_ids
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()

    run_bounded(main)


def test_spans_that_lie_on_a_decode_worker_are_offered(model):
    """The next turn: another worker pulls what is cached here, and computes only the rest."""

    async def main():
        async with run_pair(model) as (pair, _, _):
            await pair.generate_here("turn1", make_spec(worker_prompt(200), max_tokens=4))
            spec = make_spec(worker_prompt(200) + worker_prompt(50, 3), max_tokens=5)
            hello = pair.prefill.hello
            pair.decode, pair.prefill = pair.prefill, pair.decode  # it takes, the other gives
            key = pb.Key(request_id="turn2")
            await pair.decode.send(admit=pb.Admit(key=key, spec=spec))
            await pair.decode.next("turn2", "granted")
            taker = pair.taker()
            assert taker.instance == hello.instance
            await pair.prefill.send(
                offer=pb.Offer(key=key, spans=pb.SpanChain(hashes=spec.span_hashes[:3]), taker=taker, budget_ms=9000)
            )
            offered = await pair.prefill.next("turn2", "offered")
            await pair.decode.send(fetch=pb.Fetch(key=key, handle=offered.handle, ticket=offered.ticket))
            fetched = await pair.decode.next("turn2", "fetched")
            assert fetched.num_tokens == 192
            await pair.decode.send(prefill=pb.Prefill(key=key))
            done = await pair.decode.next("turn2", "done")
            assert (await pair.prefill.wait_ended("turn2")).code == 0

            await pair.prefill.send(offer=pb.Offer(
                key=pb.Key(request_id="far"), spans=pb.SpanChain(hashes=[*spec.span_hashes, b"x" * 32]), taker=taker,
                budget_ms=9000,
            ))  # fmt: skip
            assert (await pair.prefill.next("far", "not_here")).num_matched_tokens == 192
            await pair.decode.send(cancel=pb.Cancel(key=key))
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()
            return [first.token_id for first in done.first_tokens]

    assert run_bounded(main) == answer_alone(model, worker_prompt(200) + worker_prompt(50, 3), 5)[0][:1]


# ---- endings ----


@pytest.mark.parametrize("phase", ["admitted", "accepted", "fetching", "done", "started", "row"])
def test_cancel_in_every_phase(model, phase, slow):
    async def main():
        async with run_pair(model) as (pair, _, _):
            spec, stop = make_spec(worker_prompt(700), max_tokens=200), asyncio.Event()

            def reached(now):
                if now == phase:
                    stop.set()

            walk = asyncio.create_task(pair.generate("victim", spec, reached))
            await stop.wait()
            await pair.cancel("victim")
            with pytest.raises(LegEnded):
                await walk
            # The walk continues while it is cancelled: it may hear of the source's end before its own.
            reason = (await pair.decode.wait_ended("victim")).reason
            assert reason in ("CANCELLED", "LEASE_EXPIRED", "KV_TRANSFER_FAILED")
            await pair.cancel("victim")  # idempotent
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()
            again = await pair.generate("after", make_spec(worker_prompt(90), max_tokens=3))
            assert len(again.token_ids[0]) == 3
            assert set(pair.decode.num_ended.values()) == {1} and set(pair.prefill.num_ended.values()) <= {1}

    run_bounded(main)


def test_a_deadline_ends_both_legs(model, slow):
    async def main():
        async with run_pair(model) as (pair, _, _):
            with pytest.raises(LegEnded) as caught:
                await pair.generate("late", make_spec(worker_prompt(100), max_tokens=900, budget_ms=500))
            assert caught.value.event.code == 4
            key = pb.Key(request_id="grant")
            await pair.decode.send(admit=pb.Admit(key=key, spec=make_spec(worker_prompt(20), budget_ms=100)))
            await pair.decode.next("grant", "granted")
            assert (await pair.decode.wait_ended("grant")).code == 4
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()

    run_bounded(main)


def test_a_taker_that_never_comes(model):
    async def main():
        async with run_pair(model, lease_ttl_s=2.0) as (pair, _, _):
            key, spec = pb.Key(request_id="left"), make_spec(worker_prompt(200))
            await pair.prefill.send(prefill=pb.Prefill(key=key, spec=spec, taker=pair.taker()))
            accepted = await pair.prefill.next("left", "accepted")
            await pair.prefill.next("left", "done")
            for _ in range(24):  # kept as long as the gateway says so
                await asyncio.sleep(0.1)
                await pair.prefill.send(renew_lease=pb.RenewLease(key=key, lease_id=accepted.lease_id))
            assert "left" not in pair.prefill.ended
            await pair.prefill.wait_ended("left")
            await pair.prefill.wait_idle()

            await pair.decode.send(admit=pb.Admit(key=key, spec=spec))
            await pair.decode.next("left", "granted")
            await pair.decode.send(fetch=pb.Fetch(key=key, handle=accepted.handle, ticket=accepted.ticket))
            assert (await pair.decode.wait_ended("left")).reason == "LEASE_EXPIRED"
            await pair.decode.wait_idle()

    run_bounded(main)


def test_tickets_and_handles_that_are_wrong(model):
    async def main():
        async with run_pair(model) as (pair, _, _):
            spec = make_spec(worker_prompt(200))
            for name in ("mine", "other"):
                key = pb.Key(request_id=name)
                await pair.prefill.send(prefill=pb.Prefill(key=key, spec=spec, taker=pair.taker()))
            mine = await pair.prefill.next("mine", "accepted")
            other = await pair.prefill.next("other", "accepted")
            wrong = {
                "forged": (mine.handle, mine.ticket[:-1] + bytes([mine.ticket[-1] ^ 1]), spec, "TICKET_REFUSED"),
                "swapped": (mine.handle, other.ticket, spec, "TICKET_REFUSED"),
                "garbage": (b"\xff garbage", mine.ticket, spec, "KV_TRANSFER_FAILED"),
                "another": (mine.handle, mine.ticket, make_spec(worker_prompt(200, 5)), "KV_TRANSFER_FAILED"),
            }
            for name, (handle, ticket, its_spec, reason) in wrong.items():
                key = pb.Key(request_id=name)
                await pair.decode.send(admit=pb.Admit(key=key, spec=its_spec))
                await pair.decode.next(name, "granted")
                await pair.decode.send(fetch=pb.Fetch(key=key, handle=handle, ticket=ticket))
                assert (await pair.decode.wait_ended(name)).reason == reason, name
            for name in ("mine", "other"):
                await pair.cancel(name)
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()

    run_bounded(main)


def test_a_finer_form_is_refused(model):
    async def main():
        async with run_pair(model, prefill={"kv_dtype": "fp16"}, decode={"kv_dtype": "fp32"}) as (pair, _, _):
            with pytest.raises(LegEnded) as caught:
                await pair.generate("odd", make_spec(worker_prompt(100)))
            assert (caught.value.event.code, caught.value.event.reason) == (9, "LAYOUT_MISMATCH")
            await pair.cancel("odd")
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()

    run_bounded(main)


def test_a_lost_stream_gives_everything_back(model, slow):
    """All blocks at once; the records of what ran, for a while, in case a gateway attaches."""

    async def main():
        async with run_pair(model) as (pair, prefill, decode):
            watchers = [await Session(f"127.0.0.1:{worker.port}").open() for worker in (prefill, decode)]
            started = asyncio.Event()
            specs = [make_spec(worker_prompt(300, i), max_tokens=500) for i in range(3)]
            walks = [
                asyncio.create_task(pair.generate(f"r{i}", spec, lambda now: now == "row" and started.set()))
                for i, spec in enumerate(specs)
            ]
            await started.wait()
            await pair.prefill.close()
            await pair.decode.close()
            for walk in walks:
                walk.cancel()
            await asyncio.gather(*walks, return_exceptions=True)
            for watcher in watchers:
                await watcher.wait_idle()
                assert not watcher.ended, "another gateway heard of it"
                await watcher.close()
            assert not prefill.dispatcher.legs
            assert {leg.state for leg in decode.dispatcher.legs.values()} <= {LegState.ORPHANED}

    run_bounded(main)


def test_a_step_that_fails_ends_its_keys_and_nothing_else(model):
    async def main():
        async with run_pair(model) as (pair, _, decode):
            healthy = decode.engine.runner.run

            def fail(slices, on_layer):
                decode.engine.runner.run = healthy
                raise RuntimeError("a kernel went wrong")

            decode.engine.runner.run = fail
            with pytest.raises(LegEnded) as caught:
                await pair.generate_here("broken", make_spec(worker_prompt(100)))
            assert (caught.value.event.code, caught.value.event.reason) == (13, "ENGINE_FAILED")
            await pair.generate_here("after", make_spec(worker_prompt(100)))
            await pair.decode.wait_idle()

    run_bounded(main)


def test_a_stalled_loop_is_not_serving(model):
    async def main():
        async with run_pair(model) as (pair, _, decode):
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{decode.port}")
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="baton.v1.Worker"))

            async def wait_for(status):
                while (await watch.read()).status != status:
                    pass

            await wait_for(health_pb2.HealthCheckResponse.SERVING)
            healthy, stuck = decode.engine.runner.run, threading.Event()
            decode.engine.runner.run = lambda slices, on_layer: stuck.wait(30) and healthy(slices, on_layer)
            walk = asyncio.create_task(pair.generate_here("stuck", make_spec(worker_prompt(100))))
            await wait_for(health_pb2.HealthCheckResponse.NOT_SERVING)
            assert (await pair.decode.next_load()).state == "stalled"
            decode.engine.runner.run = healthy
            stuck.set()
            await walk
            await wait_for(health_pb2.HealthCheckResponse.SERVING)
            watch.cancel()
            await channel.close()

    run_bounded(main)


# ---- sessions ----


def test_a_hello_says_what_the_worker_is(model):
    async def main():
        async with run_worker(model, "decode") as worker:
            session = await Session(f"127.0.0.1:{worker.port}").open()
            hello = session.hello
            assert (hello.protocol_min, hello.protocol_max, list(hello.roles)) == (1, 1, ["decode"])
            assert len(hello.instance) == 16 and hello.epoch and len(hello.tokenizer_digest) == 32
            assert hello.limits.num_blocks == 160 and hello.limits.max_model_len == 1024
            assert hello.model.vocab_size == VOCAB and hello.model.attention
            assert list(hello.model.transports) == ["inproc", "shm", "tcp", "grpc"] and hello.host_id
            assert hello.kv_gives and set(hello.kv_gives) <= set(hello.kv_takes)
            described = await session.stub.Describe(pb.DescribeRequest())
            assert described.wall_time_ns > 0
            described.ClearField("wall_time_ns")
            assert described == hello
            await session.close()

            newer = pb.Command(hello=pb.Hello(protocol_min=2, protocol_max=9))
            for first in (newer, pb.Command(subscribe=pb.Subscribe())):
                stranger = Session(f"127.0.0.1:{worker.port}")
                await stranger.call.write(first)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    while await stranger.call.read() is not grpc.aio.EOF:
                        pass
                    raise AssertionError("it was let in")
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                await stranger.close()

    run_bounded(main)


def test_index_events(model):
    async def main():
        async with run_pair(model) as (pair, _, decode):
            first, second = make_spec(worker_prompt(200)), make_spec(worker_prompt(200, 4))
            await pair.generate_here("a", first)
            await pair.decode.send(subscribe=pb.Subscribe())
            snapshot = await asyncio.wait_for(pair.decode.block_events.get(), 10)
            assert snapshot.snapshot and snapshot.seq == 0 and snapshot.epoch == pair.decode.hello.epoch
            assert set(first.span_hashes) <= set(snapshot.sealed) == set(decode.engine.ledger.snapshot())
            await pair.generate_here("b", second)
            known, seq = set(snapshot.sealed), 0
            while not set(second.span_hashes) <= known:
                events = await asyncio.wait_for(pair.decode.block_events.get(), 10)
                assert not events.snapshot and events.seq == seq + 1
                seq = events.seq
                known = (known | set(events.sealed)) - set(events.evicted)
            for i in range(8):  # 160 blocks: the oldest are evicted
                await pair.generate_here(f"c{i}", make_spec(worker_prompt(900, 10 + i), max_tokens=2))
            async with asyncio.timeout(10):
                while known != set(decode.engine.ledger.snapshot()):
                    events = await pair.decode.block_events.get()
                    known = (known | set(events.sealed)) - set(events.evicted)
            assert not set(first.span_hashes) <= known

    run_bounded(main)
