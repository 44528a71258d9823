"""Both clients against gateways that break off: nothing lost, nothing twice, one clear error where nothing helps."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from baton.client import AsyncClient, CallError, Client, RetryPolicy, retries
from baton.client.request import make_request
from baton.client.retries import Addresses, Attempts
from baton.service.errors import AlreadyExists, Cancelled, Internal, InvalidRequest, Overloaded, Unavailable
from tests.client.conftest import NUM_TOKENS, ScriptedGateway, answer_of, serving
from tests.support.client import gather
from tests.support.pace import patience

GONE = Unavailable("gone")
QUICK = RetryPolicy(first_pause_s=0.001, longest_pause_s=0.002)
PATIENT = RetryPolicy(first_pause_s=30, longest_pause_s=30)


@pytest.fixture(autouse=True)
def from_the_first(monkeypatch):
    """Of several addresses the first is asked first."""
    monkeypatch.setattr(retries.random, "randrange", lambda stop: 0)


def asked_blocking(target, prompt, api_key=None, **options):
    with Client(target, retry=QUICK, api_key=api_key) as client:
        stream = client.stream(prompt, **options)
        return list(stream), stream


def asked_async(target, prompt, api_key=None, **options):
    async def ask():
        async with AsyncClient(target, retry=QUICK, api_key=api_key) as client:
            stream = client.stream(prompt, **options)
            return [message async for message in stream], stream

    return asyncio.run(ask())


@pytest.fixture(params=[asked_blocking, asked_async], ids=["blocking", "asyncio"])
def ask(request):
    return request.param


def text_of(messages, index: int = 0) -> str:
    return "".join(message.text for message in messages if message.index == index)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("broken_after", range(2 * NUM_TOKENS))
def test_a_stream_goes_on_at_another_gateway(gateways, ask, n, broken_after):
    broken_after %= n * NUM_TOKENS
    first, second = gateways(2)
    first.script = [(broken_after, GONE)]
    messages, stream = ask(f"{first.target},{second.target}", "a", n=n, request_id="r", seed=3)
    whole = answer_of(first.requests[0])
    reply, expected = gather(messages), gather(whole)  # one end a choice, usage last, the seed at first alone
    assert reply.outcome() == expected.outcome() and reply.usage == expected.usage
    assert [message.prompt_tokens for message in messages] == [1] + [0] * (len(messages) - 1)
    assert stream.num_resumed == 1
    (again,) = second.requests
    assert again.request_id == "r" and again.sampling.seed == 3 and len(again.resume_from) == n
    assert sum(again.resume_from) == sum(len(message.token_ids) for message in whole[:broken_after])


def test_what_is_not_named_is_drawn_here(gateways, ask):
    """A gateway that dies before its first message would take its seed along."""
    first, second = gateways(2)
    first.script = [(0, GONE)]
    ask([first.target, second.target], "a")
    (one,), (again,) = first.requests, second.requests
    assert one.request_id and one.request_id == again.request_id
    assert one.sampling.HasField("seed") and one.sampling.seed == again.sampling.seed
    assert not one.resume_from and again.resume_from == [0]


def test_what_names_an_answer_that_it_continues_is_not_drawn_here(gateways):
    """With another seed another answer would follow: the gateway refuses what lacks it."""
    (gateway,) = gateways(1)
    request = make_request("a", {"temperature": 1.0})
    request.resume_from.append(2)
    with Client(gateway.target) as client:
        list(client.send(request))
        client.complete(request)
    for sent in gateway.requests:
        assert not sent.request_id and not sent.sampling.HasField("seed") and sent.resume_from == [2]


def test_a_stream_breaks_again_and_again(gateways, ask):
    """What brings tokens is no failure in a row: more breaks than attempts."""
    (gateway,) = gateways(1)
    gateway.script = [(1, GONE)] * (NUM_TOKENS - 1)
    policy = RetryPolicy(max_attempts=2, first_pause_s=0.001)
    with Client(gateway.target, retry=policy) as client:
        messages = list(client.stream("a"))
    assert gather(messages).token_ids == list(range(NUM_TOKENS))
    assert [list(request.resume_from) for request in gateway.requests] == [[], [1], [2], [3], [4], [5]]


def test_attempts_without_a_token_are_counted(gateways):
    (gateway,) = gateways(1)
    gateway.script = [(2, GONE), *[(0, GONE)] * 9]
    with Client(gateway.target, retry=RetryPolicy(max_attempts=3, first_pause_s=0.001)) as client:
        stream, received = client.stream("a"), []
        with pytest.raises(CallError, match="UNAVAILABLE: gone"):
            for message in stream:
                received += message.token_ids
    assert received == [0, 1] and len(gateway.requests) == 3


@pytest.mark.parametrize("broken_after", [0, 3])
def test_a_call_that_a_server_cancels_as_it_shuts_down_goes_on(gateways, ask, broken_after):
    first, second = gateways(2)
    first.script = [(broken_after, None)]
    messages, stream = ask(f"{first.target},{second.target}", "a", request_id="r", seed=3)
    assert gather(messages).token_ids == list(range(NUM_TOKENS)) and stream.num_resumed == 1
    assert len(second.requests) == 1


def test_a_call_that_the_gateway_says_is_cancelled_is_over(gateways, ask):
    (gateway,) = gateways(1)
    gateway.script = [(1, Cancelled("another stream resumes it"))]
    with pytest.raises(CallError, match="CANCELLED"):
        ask(gateway.target, "a")
    assert len(gateway.requests) == 1


@pytest.mark.parametrize("error", [InvalidRequest("sampling.top_p", "is 7"), Internal("a bug")])
def test_what_would_fail_again_is_not_sent_again(gateways, ask, error):
    (gateway,) = gateways(1)
    gateway.script = [(1, error)]
    with pytest.raises(CallError) as caught:
        ask(gateway.target, "a")
    assert caught.value.code() is error.code and caught.value.field == error.field
    assert len(gateway.requests) == 1


def test_what_diverged_is_not_joined_with_what_has_come(gateways, ask):
    """From its beginning it would be another answer, whose first tokens nobody sees."""
    (gateway,) = gateways(1)
    diverged = Unavailable("it diverged", reason="DIVERGED")
    gateway.script = [(2, diverged)]
    with pytest.raises(CallError, match="it diverged"):
        ask(gateway.target, "a")
    assert len(gateway.requests) == 1
    gateway.script = [(0, diverged)]
    messages, _ = ask(gateway.target, "a")
    assert gather(messages).token_ids == list(range(NUM_TOKENS))


@pytest.mark.parametrize("broken_after", [0, 3])
def test_each_attempt_shows_the_key_as_it_is_then(gateways, ask, broken_after):
    (gateway,) = gateways(1)
    gateway.script = [(broken_after, GONE)]
    keys = iter(["old", "new"])
    messages, _ = ask(gateway.target, "a", api_key=lambda: next(keys))
    assert gather(messages).token_ids == list(range(NUM_TOKENS))
    assert [sent["authorization"] for sent in gateway.metadata] == ["Bearer old", "Bearer new"]


async def fetch_key() -> str:
    return "new"


def test_a_key_that_is_no_string_is_not_sent(gateways, ask):
    (gateway,), fetching = gateways(1), fetch_key()
    with pytest.raises(TypeError, match="api_key: .* a coroutine"):
        ask(gateway.target, "a", api_key=lambda: fetching)
    assert not gateway.requests
    fetching.close()


@pytest.mark.parametrize("key", ["", "two words", "[keys.k1]\ntenant = 'main'\n", "k\u00e4y"])
def test_what_can_be_no_key_is_not_sent(gateways, ask, key):
    (gateway,) = gateways(1)
    with pytest.raises(ValueError, match="api_key: is no key"):
        ask(gateway.target, "a", api_key=key)
    assert not gateway.requests


def test_a_key_that_was_read_from_a_file_ends_with_a_newline(gateways, ask):
    (gateway,) = gateways(1)
    ask(gateway.target, "a", api_key="secret\n")
    assert gateway.metadata[-1]["authorization"] == "Bearer secret"


def test_a_refused_client_waits_as_long_as_is_asked(gateways, ask):
    (gateway,) = gateways(1)
    gateway.script = [(0, Overloaded("full", 0.3))]
    began = time.monotonic()
    messages, _ = ask(gateway.target, "a")
    assert len(messages) == NUM_TOKENS and time.monotonic() - began >= 0.3


def test_no_pause_goes_beyond_the_deadline(gateways):
    (gateway,) = gateways(1)
    gateway.script = [(0, Overloaded("full", 1000.0))]
    with Client(gateway.target) as client, pytest.raises(CallError) as caught:
        list(client.stream("a", timeout_s=20))
    assert caught.value.retry_after_s == 1000.0 and caught.value.reason == "OVERLOADED"


def test_a_pause_of_centuries_can_be_waited_for():
    """A longer one than threads can wait for would end the call in an OverflowError."""
    error = CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    error.retry_after_s = 3e11  # the most that RetryInfo can say
    assert Attempts(QUICK, None).pause_s(error) == threading.TIMEOUT_MAX


def test_all_attempts_share_one_deadline(gateways):
    (gateway,) = gateways(1)
    gateway.script = [(1, GONE), (0, GONE)]
    policy = RetryPolicy(first_pause_s=0.6, longest_pause_s=0.6)  # half of it at least
    with Client(gateway.target, timeout_s=1000, retry=policy) as client:
        list(client.stream("a", timeout_s=9))  # longer ones are sent in whole seconds
    first, second, third = gateway.remaining_s
    assert 9.1 > first > second + 0.2 > third + 0.4


def test_the_old_stream_is_not_known_to_be_dead_yet(gateways):
    (gateway,) = gateways(1)
    in_use = AlreadyExists("in use", reason="REQUEST_ID_IN_USE")
    gateway.script = [(1, GONE), (0, in_use)]
    with Client(gateway.target, retry=QUICK) as client:
        assert gather(client.stream("a")).token_ids == list(range(NUM_TOKENS))
        gateway.script = [(0, in_use)]  # of somebody else: never ours
        with pytest.raises(CallError, match="ALREADY_EXISTS"):
            list(client.stream("a", request_id="theirs"))


def test_a_policy_of_one_attempt_sends_what_it_is_given(gateways):
    (gateway,) = gateways(1)
    gateway.script = [(1, GONE)]
    with Client(gateway.target, retry=RetryPolicy(max_attempts=1)) as client:
        with pytest.raises(CallError, match="gone"):
            list(client.stream("a"))
    (request,) = gateway.requests
    assert not request.request_id and not request.HasField("sampling")


def test_a_stream_is_cancelled(gateways):
    (gateway,) = gateways(1)
    with Client(gateway.target, retry=QUICK) as client:
        stream = client.stream("a")
        next(stream)
        stream.cancel()
        with pytest.raises(CallError, match="CANCELLED"):
            list(stream)
    assert len(gateway.requests) == 1


def test_a_stream_is_cancelled_in_a_pause(gateways):
    (gateway,) = gateways(1)
    gateway.script = [(1, GONE)]
    with Client(gateway.target, retry=PATIENT) as client, ThreadPoolExecutor(1) as threads:
        stream = client.stream("a")
        next(stream)
        pausing = threads.submit(next, stream)
        time.sleep(0.1)
        stream.cancel()
        with pytest.raises(CallError, match="CANCELLED"):
            pausing.result(patience(10))
    assert len(gateway.requests) == 1


async def test_a_stream_of_asyncio_is_cancelled_in_a_pause(gateways):
    (gateway,) = gateways(1)
    gateway.script = [(1, GONE)]
    async with AsyncClient(gateway.target, retry=PATIENT) as client:
        stream = client.stream("a")
        await anext(stream)
        pausing = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.1)
        stream.cancel()
        with pytest.raises(CallError, match="CANCELLED"):
            await asyncio.wait_for(pausing, patience(10))
    assert len(gateway.requests) == 1


@pytest.mark.parametrize("num", [1, 2])
def test_what_runs_ends_with_its_client(gateways, num):
    """gRPC says of a closed channel what it says of a server that shuts down."""
    found = gateways(num)
    with Client([gateway.target for gateway in found], retry=QUICK) as client:
        stream = client.stream("a")
        next(stream)
        client.close()
        with pytest.raises(CallError, match="CANCELLED"):
            list(stream)
        with pytest.raises(CallError, match="CANCELLED"):
            client.generate("a")
    assert sum(len(gateway.requests) for gateway in found) == 1


@pytest.mark.parametrize("what", ["stream", "call"])
def test_what_pauses_ends_with_its_client(gateways, what):
    (gateway,) = gateways(1)
    gateway.script = [(0, Overloaded("quota", 1000.0))]
    with ThreadPoolExecutor(1) as threads:
        client = Client(gateway.target, timeout_s=None)
        pausing = threads.submit(lambda: next(client.stream("a")) if what == "stream" else client.generate("a"))
        while not client._addresses._pauses:
            time.sleep(0.01)
        client.close()
        with pytest.raises(CallError, match="CANCELLED"):
            pausing.result(patience(10))


@pytest.mark.parametrize("what", ["stream", "call"])
async def test_what_pauses_ends_with_its_client_of_asyncio(gateways, what):
    (gateway,) = gateways(1)
    gateway.script = [(0, Overloaded("quota", 1000.0))]
    client = AsyncClient(gateway.target, timeout_s=None)
    pausing = asyncio.ensure_future(anext(client.stream("a")) if what == "stream" else client.generate("a"))
    while not client._addresses._pauses:
        await asyncio.sleep(0.01)
    await client.close()
    with pytest.raises(CallError, match="CANCELLED"):
        await asyncio.wait_for(pausing, patience(10))


class Silent(ScriptedGateway):
    """Answers nothing until its server ends."""

    def Generate(self, request, context):
        self.Complete(request, context)
        yield from ()

    def Complete(self, request, context):
        self._note(request, context)
        ended = threading.Event()
        if context.add_callback(ended.set):  # not: it has ended already
            ended.wait()


@pytest.mark.parametrize("what", ["stream", "call"])
async def test_what_waits_for_an_answer_ends_with_its_client_of_asyncio(what):
    """gRPC says of a closed channel what asyncio says of a task that is cancelled."""
    with serving(Silent()) as gateway:
        client = AsyncClient(gateway.target, retry=QUICK)
        waiting = asyncio.ensure_future(anext(client.stream("a")) if what == "stream" else client.generate("a"))
        while not gateway.requests:
            await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(CallError, match="CANCELLED"):
            await asyncio.wait_for(waiting, patience(10))


class Watched(ScriptedGateway):
    """Goes on until its caller has gone."""

    def __init__(self):
        super().__init__()
        self.left = threading.Event()

    def Generate(self, request, context):
        context.add_callback(self.left.set)
        while not self.left.wait(0.01):
            yield answer_of(request)[0]


async def first_of(stream) -> AsyncIterator[str]:
    async for message in stream:
        yield message.text


@pytest.mark.parametrize("how", ["break", "generator", "another thread"])
async def test_a_stream_of_asyncio_that_its_reader_leaves_is_cancelled(how):
    """gRPC keeps a call until it ends: one was computed to its end."""
    with serving(Watched()) as gateway:
        async with AsyncClient(gateway.target, retry=QUICK) as client:
            if how == "break":
                async for _ in client.stream("a"):
                    break
            elif how == "generator":
                answering = first_of(client.stream("a"))
                await anext(answering)
                await answering.aclose()
            else:
                streams = [client.stream("a")]
                await anext(streams[0])
                await asyncio.to_thread(streams.clear)
            assert await asyncio.to_thread(gateway.left.wait, patience(10))


def test_threads_open_an_address_once():
    opened, both = [], threading.Barrier(2)

    def open_one(target: str) -> str:
        opened.append(target)
        time.sleep(0.1)
        return target

    def ask() -> tuple[int, str]:
        both.wait()
        return addresses.current()

    addresses = Addresses("a:1", open_one)
    with ThreadPoolExecutor(2) as threads:
        assert [each.result() for each in [threads.submit(ask) for _ in range(2)]] == [(0, "a:1")] * 2
    assert opened == ["a:1"]


async def test_a_task_that_is_cancelled_stays_so(gateways):
    (gateway,) = gateways(1)
    async with AsyncClient(gateway.target, retry=PATIENT) as client:
        gateway.script = [(1, GONE)]
        stream = client.stream("a")
        await anext(stream)
        pausing = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.1)
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        other = client.stream("b")
        await anext(other)
        other.cancel()
        with pytest.raises(CallError, match="CANCELLED"):
            while True:
                await anext(other)


@pytest.mark.parametrize("error", [GONE, Overloaded("full", 0.001)])
def test_whole_answers_and_small_calls_are_sent_again(gateways, error):
    (gateway,) = gateways(1)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    with Client(gateway.target, retry=QUICK) as client:
        gateway.script = [(0, error), None, (0, error), None, (0, error)]
        assert client.generate("a").choices[0].text == text_of(answer_of(gateway.requests[0]))
        one, again = gateway.requests
        assert again.request_id == one.request_id and again.resume_from == [0], "what runs already is attached to"
        assert client.chat(messages).choices[0].text
        assert client.tokenize("abc") == [0, 1, 2]
        assert client.tokenize(messages) == [0, 1]
        assert client.detokenize([4, 5]) == "4 5"
        assert [each.text for each in client.token_texts([4, 5])] == [b"4", b"5"]
        assert client.model_info().name == "demo"
        assert [each.name for each in client.list_models()] == ["demo"]


async def test_asyncio_has_the_same_calls(gateways):
    (gateway,) = gateways(1)
    async with AsyncClient(gateway.target, api_key="secret", retry=QUICK) as client:
        gateway.script = [(0, GONE)]
        assert (await client.generate([1, 2], max_tokens=3)).choices[0].text
        assert gateway.requests[-1].token_ids.ids == [1, 2] and gateway.requests[-1].stopping.max_tokens == 3
        assert (await client.chat([{"role": "user", "content": "x"}])).choices[0].text
        assert await client.tokenize("abc") == [0, 1, 2]
        assert await client.detokenize([4, 5]) == "4 5"
        assert [each.text for each in await client.token_texts([4, 5])] == [b"4", b"5"]
        assert (await client.model_info()).name == "demo"
        assert [each.name for each in await client.list_models()] == ["demo"]
    assert gateway.metadata[-1]["authorization"] == "Bearer secret"


def test_unreachable_gateways_are_unavailable():
    with Client("127.0.0.1:9,127.0.0.1:10", retry=QUICK, timeout_s=20) as client:
        with pytest.raises(CallError) as caught:
            list(client.stream("a"))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_an_address_that_is_dead_from_the_start(gateways, ask):
    (gateway,) = gateways(1)
    messages, stream = ask(f"127.0.0.1:9,{gateway.target}", "a")
    assert len(messages) == NUM_TOKENS and stream.num_resumed == 1


def test_threads_share_a_client(gateways):
    first, second = gateways(2)
    first.script = [(2, GONE)] * 8
    with Client([first.target, second.target], retry=QUICK) as client, ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda _: gather(client.stream("a")), range(16)))
    assert all(reply.token_ids == list(range(NUM_TOKENS)) for reply in replies)
