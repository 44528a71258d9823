"""J2: mixed versions. The contract grows by fields: who does not know one, or does not say it, is served without. What
would be misunderstood has another number and is refused at Hello. No pair of versions changes a token."""

import asyncio

import pytest

from tests.support.faults import translator
from tests.support.faults.cases import NOBODY_NOTICES
from tests.support.faults.translator import unchanged


@pytest.fixture(scope="module")
def translated(make_world):
    with make_world("versions", stack_class=translator.TranslatedStack, gateway_options=()) as world:
        yield world


async def states(c, *wanted: str) -> None:
    """Until every worker is in one of these, as the gateway sees it."""
    seen = {}
    async with asyncio.timeout(20):
        while set(seen.values()) != set(wanted):
            await asyncio.sleep(0.05)
            seen = await c.world.aside(c.world.states)


async def spoken(c, processes, commands, events, *wanted: str) -> None:
    c.stack.translate(processes, commands, events)
    await asyncio.sleep(0.5)  # the old sessions have ended
    await states(c, *wanted)


@pytest.mark.faults
@pytest.mark.parametrize("who", ["worker", "gateway"])
@pytest.mark.parametrize("word", ["newer", "older"])
async def test_versions_that_understand_each_other(case, translated, word, who):
    """One worker of each role beside two of this build, then all of them."""
    async with case(f"J2 {word} {who}", NOBODY_NOTICES, world=translated) as c:
        change = getattr(translator, word)
        changes = (unchanged, change) if who == "worker" else (change, unchanged)
        for processes in ([c.stack.prefill[1], c.stack.decode[1]], c.stack.workers):
            await spoken(c, processes, *changes, "serving")
            await c.ended(*c.ask_many(8, 200, max_tokens=12))
        await spoken(c, c.stack.workers, unchanged, unchanged, "serving")
        assert {ask.status for ask in c.history.asks} == {"OK"}


@pytest.mark.faults
async def test_a_worker_of_another_protocol(case, translated):
    """Refused by name, as long as it is one; without any other no worker can answer."""
    async with case("J2 other protocol", "refused at Hello, the others answer", ("OK", "UNAVAILABLE"), translated) as c:
        await spoken(
            c, [c.stack.prefill[1], c.stack.decode[1]], unchanged, translator.incompatible, "serving", "refused"
        )
        some = c.ask_many(6, 200, max_tokens=12)
        await c.ended(*some)
        await spoken(c, c.stack.workers, unchanged, translator.incompatible, "refused")
        none = c.ask(100, 4)
        await c.ended(none)
        await spoken(c, c.stack.workers, unchanged, unchanged, "serving")
        assert {ask.status for ask in some} == {"OK"} and none.status == "UNAVAILABLE", none.words()


@pytest.mark.faults
async def test_a_gateway_of_another_protocol(case, translated):
    async with case("J2 other gateway", "refused by the workers", ("UNAVAILABLE",), translated) as c:
        await spoken(c, c.stack.workers, translator.incompatible, unchanged, "connecting")
        ask = c.ask(100, 4)
        await c.ended(ask)
        await spoken(c, c.stack.workers, unchanged, unchanged, "serving")


@pytest.mark.faults
async def test_kv_that_lies_in_another_order(case, translated):
    """Such a worker is never paired with one of this build: it reads its prompts itself."""
    async with case("J2 other layout", NOBODY_NOTICES, world=translated) as c:
        await spoken(c, [c.stack.prefill[1], c.stack.decode[1]], unchanged, translator.other_layout, "serving")
        await c.ended(*c.ask_many(8, 200, max_tokens=12))
        await spoken(c, c.stack.prefill, unchanged, translator.other_layout, "serving")
        await c.ended(*c.ask_many(8, 200, max_tokens=12))
        await spoken(c, c.stack.workers, unchanged, unchanged, "serving")
