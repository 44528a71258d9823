"""Every method of every service is in the guard's table, and each caller gets through to what the table says, and to
nothing else (S1, S3)."""

import asyncio
import re
from pathlib import Path

import grpc
import pytest

from baton.service.security.guard import ANYONE, METHODS, TENANT
from baton.service.security.tls import ROLES
from tests.support.client import read_error
from tests.support.security.installation import API_KEY
from tests.support.security.methods import FILES, methods

DOCS = Path(__file__).resolve().parents[3] / "docs" / "security.md"
LET_THROUGH = {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.OK}


def test_the_table_has_every_method_and_no_other():
    assert METHODS.keys() == methods().keys()


def test_every_proto_file_is_walked():
    names = {path.stem for path in (DOCS.parents[1] / "protos" / "baton" / "v1").glob("*.proto")}
    assert names == {Path(file.DESCRIPTOR.name).stem for file in FILES if "baton" in file.DESCRIPTOR.name}


def test_only_known_words():
    assert set().union(*METHODS.values()) == {*ROLES, TENANT, *ANYONE}


def test_the_table_in_the_docs():
    (drawn,) = re.findall("<!-- methods -->\n(.*?)\n<!-- end -->", DOCS.read_text(), re.DOTALL)
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in drawn.splitlines()[2:]]
    assert {f"/{method}": set(who.split(", ")) for method, who in rows} == {k: set(v) for k, v in METHODS.items()}


async def ask(channel: grpc.aio.Channel, path: str, metadata=(), num_messages: int = 0) -> grpc.StatusCode:
    """Call a method with that many empty messages, and return its status. The channel's side is always a stream, so a
    method of one message that gets none would wait for it if it were served."""
    try:
        call = channel.stream_stream(path)(timeout=10, metadata=metadata)
        for _ in range(num_messages):
            await call.write(b"")
        if num_messages:
            await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await call.code()


CALLERS = {None: set(), **{role: {role} for role in ROLES}}


@pytest.mark.parametrize("with_key", [False, True], ids=["no key", "key"])
@pytest.mark.parametrize("role", CALLERS, ids=str)
async def test_each_caller_gets_through_to_what_the_table_says(guarded, installation, role, with_key):
    access, names = (
        installation.access(role, API_KEY if with_key else None),
        CALLERS[role] | ({TENANT} if with_key else set()),
    )
    async with guarded() as ports, access.channel(ports.fleet if role else ports.client) as channel:
        for path, allowed in METHODS.items():
            passes = allowed == ANYONE or bool(allowed & names)
            code = await ask(channel, path, access.metadata, int(passes))
            if passes:
                assert code in LET_THROUGH, (path, code)
            elif names:
                assert code is grpc.StatusCode.PERMISSION_DENIED, (path, code)
            else:
                assert code is grpc.StatusCode.UNAUTHENTICATED, (path, code)
        denied = sum(not (allowed == ANYONE or allowed & names) for allowed in METHODS.values())
        assert ports.guard.num_denied.total() == denied


BAD_KEYS = [
    "Bearer",
    "Bearer ",
    "Bearer nonsense",
    "Bearer baton.k00000000." + "x" * 43,
    "Bearer " + "x" * 5000,
    "Basic dXNlcjpwYXNz",
    "Bearer eyJhbGciOiJub25lIn0.eyJ0ZW5hbnQiOiJhY21lIn0.",
]


@pytest.mark.parametrize("shown", BAD_KEYS, ids=range(len(BAD_KEYS)))
async def test_no_method_takes_a_wrong_key(guarded, installation, shown):
    async with guarded() as ports, installation.access().channel(ports.client) as channel:
        for path, allowed in METHODS.items():
            code = await ask(channel, path, (("authorization", shown),), int(allowed == ANYONE))
            assert code is grpc.StatusCode.UNAUTHENTICATED or (allowed == ANYONE and code in LET_THROUGH), (path, code)


async def test_a_wrong_key_is_no_better_beside_a_certificate(guarded, installation):
    access = installation.access("operator")
    async with guarded() as ports, access.channel(ports.fleet) as channel:
        code = await ask(channel, "/baton.v1.Fleet/ListWorkers", (("authorization", "Bearer nonsense"),))
        assert code is grpc.StatusCode.UNAUTHENTICATED


async def test_two_keys_are_none(guarded, installation):
    access = installation.access(key=API_KEY)
    async with guarded() as ports, access.channel(ports.client) as channel:
        code = await ask(channel, "/baton.v1.Inference/Generate", access.metadata * 2)
        assert code is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("path", ["/baton.v1.Inference/Secret", "/other.Service/Method", "/x/y"])
async def test_what_is_not_in_the_table_is_open_to_nobody(guarded, installation, path):
    """Who is known hears that there is no such method; strangers hear nothing of what there is."""
    for role in (None, *ROLES):
        for with_key in (False, True):
            access, is_known = installation.access(role, API_KEY if with_key else None), bool(role or with_key)
            async with guarded() as ports, access.channel(ports.fleet if role else ports.client) as channel:
                code = await ask(channel, path, access.metadata)
                assert code is (grpc.StatusCode.UNIMPLEMENTED if is_known else grpc.StatusCode.PERMISSION_DENIED)
                denied = {} if is_known else {("other", "PERMISSION_DENIED"): 1}
                assert ports.guard.num_denied == denied
    async with guarded() as ports, installation.access().channel(ports.client) as channel:
        assert await ask(channel, path, (("authorization", "Bearer nonsense"),)) is grpc.StatusCode.UNAUTHENTICATED


async def test_tools_with_a_key_find_the_form_of_reflection_that_is_served(guarded, installation):
    """grpcurl asks for `v1`, and goes on to `v1alpha` at UNIMPLEMENTED alone."""
    access, forms = installation.access(key=API_KEY), ("v1", "v1alpha")
    paths = [f"/grpc.reflection.{form}.ServerReflection/ServerReflectionInfo" for form in forms]
    async with guarded() as ports, access.channel(ports.client) as channel:
        codes = [await ask(channel, path, access.metadata, 1) for path in paths]
        assert codes == [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.OK]


ODD_NAMES = [
    ["client.example"],
    ["baton.internal"],
    ["gateway.baton.internal.evil.example"],
    ["xgateway.baton.internal"],
    ["worker.baton.internal"],  # what servers are held to is no role
    ["127.0.0.1"],
]


@pytest.mark.parametrize("names", ODD_NAMES, ids=lambda names: names[0])
async def test_a_certificate_without_a_role_opens_nothing(guarded, make_certificate, names):
    async with guarded() as ports, make_certificate(names).channel(ports.fleet) as channel:
        for path, allowed in METHODS.items():
            if allowed != ANYONE:
                assert await ask(channel, path) is grpc.StatusCode.UNAUTHENTICATED, path


async def test_a_call_without_its_message_is_an_error(guarded, installation):
    access = installation.access(key=API_KEY)
    async with guarded() as ports, access.channel(ports.client) as channel:
        call = channel.stream_stream("/baton.v1.Inference/Complete")(timeout=10, metadata=access.metadata)
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("path", [path for path in METHODS if "Raw" not in path])  # those take any bytes
async def test_bytes_that_are_no_message_are_their_senders_fault(guarded, installation, caplog, path):
    """No caller fills the log with tracebacks, with the first message or with a later one."""
    role = next((role for role in ROLES if METHODS[path] & {role}), None)
    access = installation.access(role)
    async with guarded() as ports, access.channel(ports.fleet if role else ports.client) as channel:
        for num_well in (0, 1):
            messages = [b""] * num_well + [b"\xff" * 20]  # gRPC sends them as long as the call lasts
            call = channel.stream_stream(path)(messages, timeout=10)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            if not num_well:
                assert (caught.value.code(), caught.value.details()) == (
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "message: these bytes are not what this method takes",
                )
    assert "DecodeError" not in caplog.text


async def test_every_method_waits_for_its_first_message_and_not_for_ever(guarded, installation):
    """One message or a stream of them: the guard ends the call of an allowed caller that sends nothing."""
    async with guarded() as ports:

        async def silent(path: str) -> tuple:
            role = next((role for role in ROLES if METHODS[path] & {role}), None)
            access = installation.access(role)
            async with access.channel(ports.fleet if role else ports.client, name="localhost") as channel:
                call = channel.stream_stream(path)(timeout=60)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    while await call.read() is not grpc.aio.EOF:
                        pass
            return caught.value.code(), read_error(caught.value).reason

        ends = await asyncio.gather(*map(silent, METHODS))
        assert set(ends) == {(grpc.StatusCode.DEADLINE_EXCEEDED, "MESSAGE_LATE")}
        assert not ports.guard.slots._num_open
