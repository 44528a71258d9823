"""Workers that are not alike, leases with several takers, and prefill workers that pull their prefix."""

import asyncio
import dataclasses
import socket
from contextlib import asynccontextmanager

import pytest

from baton import failpoints
from baton.v1 import worker_pb2 as pb
from baton.worker.kv import intake
from kvtransfer.layout import Endpoint
from kvtransfer.wire import decode_handle, encode_handle
from tests.support.bare_engine import answer_alone
from tests.support.models import make_model
from tests.support.stack import SLOW_STEPS
from tests.support.worker.scripted import LegEnded, Session, make_spec, run_bounded, run_pair, run_worker, worker_prompt
from tests.support.worker.sources import generate_with_sources, offered_prefix


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("sizes", [(16, 64), (128, 32)])
def test_other_block_sizes_are_exact(model, transport, sizes):
    async def main():
        prefill, decode = ({"block_size": size, "num_blocks": 5120 // size} for size in sizes)
        async with run_pair(model, prefill, decode, transports=(transport,)) as (pair, _, _):
            answer = await pair.generate("one", make_spec(worker_prompt(300), max_tokens=9))
            assert answer.fetched.numerics == "exact" and answer.fetched.num_tokens == 300
            again = await pair.generate(
                "two", make_spec(worker_prompt(300) + worker_prompt(70, 2), max_tokens=9, n=2, seed=3, temperature=1.0)
            )
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()
            return answer.token_ids, again.token_ids

    first, second = run_bounded(main)
    assert first == answer_alone(model, worker_prompt(300), 9)
    assert second == answer_alone(model, worker_prompt(300) + worker_prompt(70, 2), 9, n=2, seed=3, temperature=1.0)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_lossier_form_is_fed_and_called_mixed(model, transport, caplog):
    caplog.set_level("INFO", "baton.worker.kv.intake")

    async def main():
        decode = {"kv_dtype": "int8", "block_size": 64, "num_blocks": 80}
        async with run_pair(model, {"kv_dtype": "fp32"}, decode, transports=(transport,)) as (pair, _, _):
            answer = await pair.generate("one", make_spec(worker_prompt(200), max_tokens=6))
            await pair.generate("two", make_spec(worker_prompt(200, 5), max_tokens=6))
            assert answer.fetched.numerics == "mixed" and len(answer.token_ids[0]) == 6
            words = set(pair.prefill.hello.kv_gives) & set(pair.decode.hello.kv_takes)
            assert words and not set(pair.decode.hello.kv_gives) & set(pair.prefill.hello.kv_takes)
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()

    run_bounded(main)
    assert sum("mixed" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("strict", [{"prefill": {"strict_numerics": True}}, {"decode": {"strict_numerics": True}}])
def test_strict_numerics(model, strict):
    async def main():
        decode = {"kv_dtype": "int8", **strict.get("decode", {})}
        async with run_pair(model, strict.get("prefill"), decode) as (pair, _, _):
            assert not set(pair.prefill.hello.kv_gives) & set(pair.decode.hello.kv_takes)
            with pytest.raises(LegEnded) as caught:
                await pair.generate("one", make_spec(worker_prompt(100)))
            assert caught.value.event.reason == "LAYOUT_MISMATCH" and "strict" in caught.value.event.message
            await pair.cancel("one")
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()

    run_bounded(main)


def test_digests_of_sha256_move_the_same_kv(model):
    async def main():
        async with run_pair(model, decode={"kv_digest": "sha256"}) as (pair, _, _):
            return (await pair.generate("one", make_spec(worker_prompt(200), max_tokens=6))).token_ids

    assert run_bounded(main) == answer_alone(model, worker_prompt(200), 6)


def test_a_lease_serves_another_taker(model):
    """The first decode worker never comes; another pulls the same lease with a ticket of its own."""

    async def main():
        async with run_pair(model) as (pair, _, _), run_worker(model, "decode", block_size=64) as other:
            second = await Session(f"127.0.0.1:{other.port}").open()
            key, again = pb.Key(request_id="one"), pb.Key(request_id="one", attempt=1)
            spec = make_spec(worker_prompt(200), max_tokens=6)
            await pair.prefill.send(prefill=pb.Prefill(key=key, spec=spec, taker=pair.taker()))
            accepted = await pair.prefill.next("one", "accepted")
            done = await pair.prefill.next("one", "done")
            await second.send(admit=pb.Admit(key=again, spec=spec))
            await second.next("one", "granted")
            pair.decode, first = second, pair.decode
            await pair.prefill.send(
                offer=pb.Offer(key=again, lease_id=accepted.lease_id, taker=pair.taker(), budget_ms=9000)
            )
            offered = await pair.prefill.next("one", "offered")
            assert offered.lease_id == accepted.lease_id and offered.ticket != accepted.ticket
            await second.send(fetch=pb.Fetch(key=again, handle=offered.handle, ticket=offered.ticket))
            fetched = await second.next("one", "fetched")
            assert fetched.num_tokens == 200
            # The first taker's ticket was never used: its leg is ended, and with it the lease.
            await first.send(admit=pb.Admit(key=key, spec=spec))
            await first.next("one", "granted")
            await first.send(fetch=pb.Fetch(key=key, handle=accepted.handle, ticket=accepted.ticket))
            assert (await first.next("one", "fetched")).num_tokens == 200
            for _ in range(2):
                assert (await pair.prefill.next("one", "ended")).code == 0
            await pair.prefill.wait_idle()

            gone = pb.Offer(key=again, lease_id=accepted.lease_id, taker=pair.taker(), budget_ms=9000)
            await pair.prefill.send(offer=gone)
            assert (await pair.prefill.next("one", "not_here")).num_matched_tokens == 0
            for session, its in ((first, key), (second, again)):
                await session.send(cancel=pb.Cancel(key=its))
                await session.wait_idle()
            await second.close()
            return done

    assert len(run_bounded(main).first_tokens) == 1


def test_a_second_taker_gives_up(model):
    """Its key ends alone, the lease stays."""

    async def main():
        async with run_pair(model) as (pair, _, _):
            key, again = pb.Key(request_id="one"), pb.Key(request_id="two")
            spec = make_spec(worker_prompt(200), max_tokens=6)
            await pair.prefill.send(prefill=pb.Prefill(key=key, spec=spec, taker=pair.taker()))
            accepted = await pair.prefill.next("one", "accepted")
            offer = pb.Offer(key=again, lease_id=accepted.lease_id, taker=pair.taker(), budget_ms=9000)
            await pair.prefill.send(offer=offer)
            await pair.prefill.next("two", "offered")
            await pair.prefill.send(cancel=pb.Cancel(key=again))
            assert (await pair.prefill.wait_ended("two")).reason == "CANCELLED"
            await pair.decode.send(admit=pb.Admit(key=key, spec=spec))
            await pair.decode.next("one", "granted")
            await pair.decode.send(fetch=pb.Fetch(key=key, handle=accepted.handle, ticket=accepted.ticket))
            await pair.decode.next("one", "fetched")
            assert (await pair.prefill.wait_ended("one")).code == 0
            await pair.decode.send(cancel=pb.Cancel(key=key))
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()

    run_bounded(main)


def test_a_held_lease_that_expires_is_no_success(model):
    async def main():
        async with run_pair(model, lease_ttl_s=2.0) as (pair, _, _):
            key = pb.Key(request_id="left")
            await pair.prefill.send(prefill=pb.Prefill(key=key, spec=make_spec(worker_prompt(100)), taker=pair.taker()))
            ended = await pair.prefill.wait_ended("left")
            assert (ended.code, ended.reason) == (14, "LEASE_EXPIRED")
            await pair.prefill.wait_idle()

    run_bounded(main)


# ---- a prefill worker as a taker ----


@pytest.mark.parametrize("block_size", [32, 128])
def test_a_prefill_worker_pulls_its_prefix(model, block_size, monkeypatch):
    """And passes it on while it reads the rest, which takes a while."""
    monkeypatch.setattr(failpoints, "_board", failpoints._Board(SLOW_STEPS))
    turn1, turn2 = worker_prompt(200), worker_prompt(200) + worker_prompt(90, 3)

    async def main():
        options = {"block_size": block_size, "num_blocks": 5120 // block_size}
        async with run_pair(model, prefill=options) as (pair, _, _), run_worker(model, "decode") as holder:
            session = await Session(f"127.0.0.1:{holder.port}").open()
            elsewhere = type(pair)(pair.prefill, session)
            await elsewhere.generate_here("turn1", make_spec(turn1, max_tokens=4))
            spec = make_spec(turn2, max_tokens=5)
            source = await offered_prefix(pair, spec, 3, session)
            tokens, done, fetched = await generate_with_sources(pair, spec, [source])
            assert fetched.num_tokens == len(turn2) and fetched.num_bytes_early > 0
            assert done.pulled == pb.Pulled(num_tokens=192 // block_size * block_size)
            assert (await session.next("offer", "ended")).code == 0
            await session.wait_idle()
            await session.close()
            return tokens

    assert run_bounded(main) == answer_alone(model, turn2, 5)[0][:1]


def test_a_prefix_that_cannot_be_pulled_is_computed(model):
    turn2 = worker_prompt(290)

    async def main():
        async with run_pair(model) as (pair, _prefill, _):
            spec = make_spec(turn2, max_tokens=5)
            sources = [pb.KVSource(handle=b"\xff", ticket=b"\xff"), pb.KVSource()]
            tokens, done, fetched = await generate_with_sources(pair, spec, sources)
            assert fetched.num_tokens == len(turn2) and not done.HasField("pulled")
            return tokens

    assert run_bounded(main) == answer_alone(model, turn2, 5)[0][:1]


@asynccontextmanager
async def run_with_prefix_elsewhere(model):
    """Yield (pair, session of the holder, spec, source): a prompt whose first 192 tokens another worker offers."""
    async with run_pair(model) as (pair, _, _), run_worker(model, "decode") as holder:
        session = await Session(f"127.0.0.1:{holder.port}").open()
        await type(pair)(pair.prefill, session).generate_here("turn1", make_spec(worker_prompt(200), max_tokens=4))
        spec = make_spec(worker_prompt(290), max_tokens=5)
        yield pair, session, spec, await offered_prefix(pair, spec, 3, session)


def test_a_source_that_says_nothing_is_told_to_the_gateway(model, monkeypatch, caplog):
    """The prompt is computed, as if nobody held any of it."""
    monkeypatch.setattr(intake, "SILENCE_S", 0.2)

    async def main():
        async with run_with_prefix_elsewhere(model) as (pair, session, spec, source):
            handle = decode_handle(source.handle)
            with socket.create_server(("127.0.0.1", 0)) as silent:
                endpoint = Endpoint("tcp", f"127.0.0.1:{silent.getsockname()[1]}", "elsewhere")
                parts = tuple(dataclasses.replace(part, endpoints=(endpoint,)) for part in handle.parts)
                source.handle = encode_handle(dataclasses.replace(handle, parts=parts))
                _, done, _ = await generate_with_sources(pair, spec, [source])
            assert done.pulled == pb.Pulled(failure="nothing came for 0.2 s", reason="KV_TRANSFER_FAILED")
            assert not done.num_cached_tokens
            await session.send(cancel=pb.Cancel(key=pb.Key(request_id="offer")))
            await session.wait_idle()
            await session.close()

    run_bounded(main)
    assert "prefix not pulled key=" in caplog.text and 'reason="nothing came for 0.2 s"' in caplog.text


def test_cancelled_while_it_pulls(model):
    async def main():
        async with run_with_prefix_elsewhere(model) as (pair, session, spec, source):
            key = pb.Key(request_id="turn2")
            await pair.prefill.send(prefill=pb.Prefill(key=key, spec=spec, taker=pair.taker(), sources=[source]))
            await pair.prefill.send(cancel=pb.Cancel(key=key))
            await pair.prefill.next("turn2", "accepted")
            assert (await pair.prefill.wait_ended("turn2")).reason == "CANCELLED"
            await pair.prefill.wait_idle()
            await session.send(cancel=pb.Cancel(key=pb.Key(request_id="offer")))
            await session.wait_idle()
            await session.close()
            await asyncio.sleep(0)

    run_bounded(main)
