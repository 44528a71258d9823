"""Real workers: a stream is lost in the middle of an answer, and another one continues it, token for token."""

import asyncio
import operator

import pytest

from baton.v1 import worker_pb2 as pb
from tests.support.models import make_model
from tests.support.pace import patience
from tests.support.worker.scripted import Answer, Pair, Session, run_bounded
from tests.worker.session.slow_answers import SAMPLINGS, begin, decode_worker, spec_of, whole


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


async def attach(session: Session, name: str, next_index: list[int], **fields):
    fields = {"budget_ms": 30_000, "fingerprint": b"f", **fields}
    await session.send(attach=pb.Attach(key=pb.Key(request_id=name, attempt=2), next_index=next_index, **fields))
    return await session.next(name, "granted", "not_here")


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("is_same_gateway", [True, False])
def test_attach_goes_on(model, sampling, is_same_gateway):
    async def main():
        async with decode_worker(model, 0.01) as (worker, target):
            spec = spec_of(sampling)
            expected = await whole(target, spec)
            first = await Session(target).open()
            answer = await begin(first, "broken", spec, 4)
            second = Session(target, first._instance if is_same_gateway else None)
            if not is_same_gateway:
                await first.close()
            await second.open()
            have = [len(answer.token_ids[choice]) for choice in range(spec.sampling.n)]
            granted = await attach(second, "broken", have)
            assert isinstance(granted, pb.Granted) and all(map(operator.ge, granted.num_tokens, have))
            assert len(granted.num_tokens) == len(have)
            await Pair(second, second).gather(second, "broken", answer)
            assert answer.token_ids == expected.token_ids and answer.finish_reasons == expected.finish_reasons
            assert answer.logprobs == expected.logprobs
            await second.wait_idle()
            assert not worker.dispatcher.legs
            for session in (first, second):
                await session.close()

    run_bounded(main)


def test_another_gateway_reads_from_the_first_token(model):
    async def main():
        async with decode_worker(model, 0.01) as (_worker, target):
            spec = spec_of("seeded")
            expected = await whole(target, spec)
            first = await Session(target).open()
            await begin(first, "broken", spec, 3)
            await first.close()
            second = await Session(target).open()
            await attach(second, "broken", [0])
            answer = Answer(token_ids={0: []}, logprobs={0: []})
            await Pair(second, second).gather(second, "broken", answer)
            assert answer.token_ids == expected.token_ids
            await second.close()

    run_bounded(main)


def test_a_lost_stream_stops_the_work_and_frees_the_blocks(model):
    async def main():
        async with decode_worker(model, 0.01) as (worker, target):
            first = await Session(target).open()
            await begin(first, "broken", spec_of("greedy"), 2)
            await first.close()
            second = await Session(target).open()
            blocks = await second.wait_idle()
            assert blocks["cached"] and worker.dispatcher.legs
            step = worker.engine.step_number
            await second.next_load(0.3)
            assert worker.engine.step_number == step, "it computed without a reader"
            assert isinstance(await attach(second, "broken", [1], fingerprint=b"another"), pb.NotHere)
            await second.close()

    run_bounded(main)


def test_a_gateway_that_comes_again_leaves_nothing_in_the_session_before(model):
    """Whose link has died without a word: what cannot be gone on with gives its blocks back."""

    async def main():
        async with decode_worker(model) as (worker, target):
            first = await Session(target).open()
            await first.send(admit=pb.Admit(key=pb.Key(request_id="broken"), spec=spec_of("greedy")))
            await first.next("broken", "granted")
            second = await Session(target, first._instance).open()
            async with asyncio.timeout(patience(5)):
                while worker.dispatcher.legs or len(worker.sessions.outboxes) > 1:
                    await asyncio.sleep(0.01)
            await second.wait_idle()
            for session in (first, second):
                await session.close()

    run_bounded(main)


def test_the_window_passes(model):
    async def main():
        async with decode_worker(model, 0.01, resume_window_s=0.2) as (worker, target):
            first = await Session(target).open()
            await begin(first, "broken", spec_of("greedy"), 2)
            await first.close()
            second = await Session(target).open()
            async with asyncio.timeout(10):
                while worker.dispatcher.legs:
                    await asyncio.sleep(0.01)
            assert isinstance(await attach(second, "broken", [1]), pb.NotHere)
            await second.close()

    run_bounded(main)


def test_unread_tokens_park_one_sequence_only(model):
    """A gateway that hangs: its long answer waits, and comes whole when it reads again."""

    async def main():
        async with decode_worker(model) as (worker, target):
            spec = spec_of("greedy")
            expected = await whole(target, spec)
            slow = await Session(target).open()
            hold = asyncio.Event()
            (outbox,) = worker.sessions.outboxes
            outbox._max_unread_tokens, write = 16, outbox._write

            async def held_write(event):
                if event.HasField("step_output"):
                    await hold.wait()
                await write(event)

            outbox._write = held_write
            answer = await begin(slow, "slow", spec, 0)
            async with asyncio.timeout(10):
                while not any(leg.state.value == "parked" for leg in worker.dispatcher.legs.values()):
                    await asyncio.sleep(0.01)
            quick = await Session(target).open()
            other = await Pair(quick, quick).generate_here("quick", spec)
            assert other.token_ids == expected.token_ids
            await quick.wait_idle()  # a load report that was on its way may be older than the answer's end
            hold.set()
            await Pair(slow, slow).gather(slow, "slow", answer)
            assert answer.token_ids == expected.token_ids
            for session in (slow, quick):
                await session.close()

    run_bounded(main)
