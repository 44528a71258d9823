"""A group of kind `state`: one block for a sequence, handed over once, when all of the prompt is there, by the same
dialogue: digest, Ack, generation, Confirm."""

import asyncio
import random

import numpy as np
import pytest

from kvtransfer import errors
from kvtransfer.layout import STATE, KVGroup, KVLayout
from kvtransfer.memory.blocks import check_movable
from kvtransfer.transfer import dialogue
from tests.support.kvtransfer.rig import NUM_TOKENS, kind, layout, running

TRANSPORTS = ("inproc", "shm", "tcp", "grpc")
STATES = KVGroup(STATE, 2, 3, 64, "fp32", 1)
HYBRID = KVLayout((*layout().groups, STATES))
ALONE = KVLayout((KVGroup("paged", 0, 1, 16, "bf16", 16), STATES))  # no layer has KV
FIRST_STATE_LAYER = layout().num_layers


@pytest.fixture(params=TRANSPORTS)
def name(request):
    return request.param


def of_state(frame, shape: KVLayout) -> bool:
    return kind(frame) == "ready" and frame.ready.range.layer_begin >= shape.first_layer(1)


def came(rig) -> bool:
    return np.array_equal(rig.state(rig.taker_pool), rig.state(rig.source_pool))


@pytest.mark.parametrize("shape", [HYBRID, ALONE], ids=["hybrid", "alone"])
@pytest.mark.parametrize("digest", ["sum", "sha256"])
def test_the_state_comes_with_the_prompt(name, shape, digest):
    async def main():
        async with running(name, shape, digest=digest) as rig:
            destination = rig.destination()
            report = await rig.fetch(rig.ready_offer(), destination)
            assert came(rig) and destination.upto == [NUM_TOKENS]
            moved = report.num_bytes - shape.state_bytes
            assert moved == NUM_TOKENS * sum(g.num_layers * 2 * g.num_kv_heads * g.row_bytes for g in shape.groups[:1])
            others = np.delete(np.arange(5), rig.taker_state)
            for other in others:  # nobody else's state was touched
                rig.taker_state = int(other)
                assert not rig.state(rig.taker_pool).any()

    asyncio.run(main())


def test_a_state_is_announced_when_all_of_the_prompt_is_there_and_verified_with_it(name):
    async def main():
        async with running(name, HYBRID) as rig:
            seen: list[tuple[int, bool]] = []  # (how far the prompt was, whether a state was announced)
            written = 0

            def fault(frame, connection):
                if kind(frame) == "ready":
                    seen.append((written, of_state(frame, HYBRID)))
                return [frame]

            rig.source.fault = fault
            offer, destination = rig.offer(), rig.destination()
            fetching = asyncio.create_task(rig.fetch(offer, destination))
            chance = random.Random(3)
            while written < NUM_TOKENS:
                whole = (upto := written + chance.choice((64, 128))) >= NUM_TOKENS
                while whole and not seen:
                    await asyncio.sleep(0.01)
                written = min(NUM_TOKENS, upto)
                rig.source.advance("k", written, None if not whole else chance.randint(1, FIRST_STATE_LAYER))
                await asyncio.sleep(0.05)
                assert not destination.upto, "KV without the state behind it is nothing to go on from"
            rig.source.finish("k")
            await fetching
            assert came(rig) and rig.arrived() and destination.upto == [NUM_TOKENS]
            assert [at for at, is_state in seen if is_state] == [NUM_TOKENS], seen
            assert any(at < NUM_TOKENS for at, is_state in seen), "KV left before the prompt's end"

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(4))
def test_what_is_cached_is_not_moved_and_the_state_is(name, seed):
    async def main():
        num_cached = random.Random(seed).randrange(0, NUM_TOKENS // 64 + 1) * 64
        async with running(name, HYBRID) as rig:
            destination = rig.destination(num_cached_tokens=num_cached)
            await rig.fetch(rig.ready_offer(), destination)
            assert came(rig) and rig.arrived(begin=num_cached) and destination.upto == [NUM_TOKENS]

    asyncio.run(main())


def test_a_prefix_that_is_here_is_not_moved_and_neither_is_its_state(name):
    async def main():
        async with running(name, HYBRID) as rig:
            destination = rig.destination(256, num_cached_tokens=256)
            report = await rig.fetch(rig.ready_offer(num_tokens=256), destination)
            assert not report.num_bytes and not rig.state(rig.taker_pool).any()

    asyncio.run(main())


def flip_a_bit(rig) -> None:
    rig.state(rig.source_pool)[-5] ^= 4


def use_again(rig) -> None:
    rig.state_generation[rig.source_state] += 1


@pytest.mark.parametrize("change, error", [(flip_a_bit, errors.DigestMismatch), (use_again, errors.StaleBlocks)])
def test_a_state_that_changes_as_it_leaves_is_refused(name, change, error):
    async def main():
        async with running(name, HYBRID) as rig:

            def fault(frame, connection):
                if of_state(frame, HYBRID):
                    change(rig)
                return [frame]

            rig.source.fault = fault
            destination = rig.destination()
            with pytest.raises(error):
                await rig.fetch(rig.ready_offer(), destination)
            assert not destination.upto
            rig.source.cancel("k")

    asyncio.run(main())


def test_a_lost_line_is_taken_up_again(name):
    async def main():
        async with running(name, HYBRID) as rig:
            left = [1]

            def fault(frame, connection):
                if of_state(frame, HYBRID) and left and left.pop():
                    connection.close()
                    raise errors.PeerLost("the line breaks")
                return [frame]

            rig.source.fault = fault
            destination = rig.destination()
            await rig.fetch(rig.ready_offer(), destination)
            assert not left and came(rig) and destination.upto == [NUM_TOKENS]

    asyncio.run(main())


def test_a_fetch_that_fails_behind_its_state_has_brought_nothing(name, monkeypatch):
    """The state is the one behind the last token: with the first tokens alone it is another prompt's."""
    monkeypatch.setattr(dialogue, "MAX_RANGE_BYTES", 1)

    async def main():
        async with running(name, HYBRID) as rig:
            confirmed = {True: 0, False: 0}  # of the state, and of KV

            def fault(frame, connection):
                if (what := kind(frame)) in ("ready", "confirm"):
                    moved = getattr(frame, what).range
                    is_state = moved.layer_begin >= FIRST_STATE_LAYER
                    is_last = not is_state and moved.token_end == NUM_TOKENS
                    if (not is_state and not confirmed[True]) or (is_last and not confirmed[False]):
                        connection.close()
                        raise errors.PeerLost("the state comes first, the last tokens behind others")
                    if what == "confirm":
                        confirmed[is_state] += 1
                    elif is_last:
                        frame.ready.digests[0] ^= 1
                return [frame]

            rig.source.fault = fault
            destination = rig.destination()
            with pytest.raises(errors.DigestMismatch):
                await rig.fetch(rig.ready_offer(), destination)
            assert confirmed[False] and not destination.upto
            rig.source.cancel("k")

    asyncio.run(main())


@pytest.mark.parametrize(
    "groups",
    [
        (STATES, *layout().groups),
        (*layout().groups, STATES, STATES),
        (*layout().groups, KVGroup(STATE, 2, 3, 64, "fp32", 16)),
    ],
    ids=["first", "two", "of-many-tokens"],
)
def test_other_places_of_a_state_are_refused(groups):
    with pytest.raises(errors.LayoutMismatch):
        check_movable(KVLayout(groups))
