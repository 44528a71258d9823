"""Calls within a process end, wait and fail as gRPC's do."""

import asyncio

import grpc
import pytest

from baton.service.errors import FailedPrecondition, abort
from baton.service.net import in_process
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from tests.support.pace import patience

ADDRESS = "127.0.0.1:9"


class Echo:
    """Answers each command with a Hello of the same instance; ends with the instance "end", fails with others."""

    def __init__(self):
        self.num_written, self.was_cancelled = 0, False

    async def Session(self, commands, context):
        try:
            async for command in commands:
                match command.hello.instance:
                    case b"end":
                        return
                    case b"abort":
                        await abort(context, FailedPrecondition("not like this"))
                    case b"fail":
                        raise ZeroDivisionError("a bug")
                await context.write(pb.Event(hello=command.hello))
                self.num_written += 1
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


def command(instance: bytes) -> pb.Command:
    return pb.Command(hello=pb.Hello(instance=instance))


def called(scenario):
    """Run `scenario(servicer, call)` with a call that reaches the servicer."""

    async def run():
        servicer = Echo()
        with in_process.reachable_as(ADDRESS) as channel:
            channel.serve(servicer)
            async with in_process.channel_to(ADDRESS) as found:
                call = worker_pb2_grpc.WorkerStub(found).Session()
                await asyncio.wait_for(scenario(servicer, call), patience(30))
                call.cancel()

    asyncio.run(run())


def test_messages_keep_their_order_and_the_end_stays():
    async def scenario(servicer, call):
        for number in range(5):
            await call.write(command(b"%d" % number))
        await call.write(command(b"end"))
        assert [(await call.read()).hello.instance for _ in range(5)] == [b"%d" % number for number in range(5)]
        assert [await call.read() for _ in range(2)] == [grpc.aio.EOF] * 2
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(command(b"late"))

    called(scenario)


@pytest.mark.parametrize(
    "instance, code, words",
    [
        (b"abort", grpc.StatusCode.FAILED_PRECONDITION, "not like this"),
        (b"fail", grpc.StatusCode.UNKNOWN, "ZeroDivisionError: a bug"),
    ],
)
def test_an_error_is_read_behind_what_came_before(instance, code, words):
    async def scenario(servicer, call):
        await call.write(command(b"first"))
        await call.write(command(instance))
        assert (await call.read()).hello.instance == b"first"
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            assert (raised.value.code(), raised.value.details()) == (code, words)

    called(scenario)


def test_what_is_not_read_is_not_written():
    async def scenario(servicer, call):
        async def write_all():
            for number in range(100):
                await call.write(command(b"%d" % number))

        writing = asyncio.create_task(write_all())
        await asyncio.sleep(0.05)
        assert not writing.done() and servicer.num_written < 50
        assert [(await call.read()).hello.instance for _ in range(100)] == [b"%d" % number for number in range(100)]
        await writing

    called(scenario)


def test_a_write_that_waits_ends_with_the_call():
    async def scenario(servicer, call):
        async def write_all():
            while True:
                await call.write(command(b"more"))

        writing = asyncio.create_task(write_all())
        await asyncio.sleep(0.05)
        assert not writing.done()
        call.cancel()
        with pytest.raises(asyncio.InvalidStateError):
            await asyncio.wait_for(writing, patience(10))

    called(scenario)


def test_cancelled_on_both_sides():
    async def scenario(servicer, call):
        await call.write(command(b"first"))
        await call.read()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        assert servicer.was_cancelled

    called(scenario)


def test_who_does_not_serve_yet_is_unavailable():
    async def run():
        with in_process.reachable_as(ADDRESS) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Session().read()
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError, match="Describe is not called within a process"):
                stub.Describe(pb.DescribeRequest())
        assert in_process.channel_to(ADDRESS) is None, "another process may listen there now"

    asyncio.run(run())
