"""`stream_interval_ms`: the first token and the last at once, between them at most one message per interval."""

import asyncio

from tests.gateway.calls import PROMPT, generate, ids_of
from tests.support.client import make_request
from tests.support.gateway.fake_worker import tokens_of


async def test_a_long_interval_leaves_the_first_message_and_the_last(cluster):
    async with cluster() as c:
        messages = await generate(c, max_tokens=60, stream_interval_ms=60_000)
        assert [len(message.token_ids) for message in messages] == [1, 59]
        assert ids_of(messages) == tokens_of(PROMPT, 60, 400) and messages[-1].HasField("usage")


async def test_each_choice_has_a_first_message_and_a_last(cluster):
    async with cluster() as c:
        messages = await generate(c, max_tokens=20, n=2, stream_interval_ms=60_000)
        for index in (0, 1):
            assert [len(each.token_ids) for each in messages if each.index == index] == [1, 19]
            assert ids_of(messages, index) == tokens_of(PROMPT, 20, 400, index)


async def test_what_is_held_goes_out_when_its_time_has_come(cluster):
    """Also where no token comes any more."""
    async with cluster() as c:
        c.decode[0].hold("decode")
        messages, begun_at = [], asyncio.get_running_loop().time()

        async def read() -> None:
            async for message in c.stub.Generate(
                make_request(PROMPT, max_tokens=300, stream_interval_ms=300), timeout=20
            ):
                messages.append(message)

        reading = asyncio.create_task(read())
        await c.until(lambda: len(messages) == 1)
        c.decode[0].release("decode")
        await asyncio.sleep(0.05)
        c.decode[0].hold("decode")
        await c.until(lambda: len(messages) == 2)
        assert not reading.done() and len(messages[1].token_ids) > 1
        c.decode[0].release("decode")
        await reading
        assert ids_of(messages) == tokens_of(PROMPT, 300, 400)
        assert len(messages) <= 3 + (asyncio.get_running_loop().time() - begun_at) / 0.3


async def test_without_one_tokens_go_out_as_they_come(cluster):
    async with cluster() as c:
        assert len(await generate(c, max_tokens=60)) > 5
