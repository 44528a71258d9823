"""Allow or refuse calls: one table of methods for all servers, and the interceptor that enforces it and the bounds of
call_slots.py.

A method that the table does not list is refused. A caller is a tenant by its credential, or has the roles of its
certificate. A server with neither certificates nor credentials, which settings permit on loopback only, is open: any
caller may call everything, as the tenant `default`."""

import contextlib
import contextvars
import functools
import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NoReturn

import grpc
from google.protobuf.message import DecodeError

from baton.protocol import DEFAULT_TENANT
from baton.service.errors import BatonError, InvalidRequest, Overloaded, PermissionDenied, Unauthenticated, abort
from baton.service.logs import fields
from baton.service.security.call_slots import CallSlot, CallSlots
from baton.service.security.credentials import Credentials
from baton.service.security.refusals import Refusals
from baton.service.security.resets import Resets
from baton.service.security.tls import DECODE, GATEWAY, OPERATOR, PREFILL, RANK, roles_of

MAX_METADATA_PAIRS = 64
_MAX_GUARDED = 1024  # handlers of tenants
TENANT = "tenant"  # callers with a credential
ANYONE = frozenset(("anyone",))
_CLIENTS = frozenset((TENANT, OPERATOR))
_WORKERS = frozenset((PREFILL, DECODE))
_OPERATORS = frozenset((OPERATOR,))
_FLEET = frozenset((GATEWAY, OPERATOR))

METHODS: dict[str, frozenset[str]] = {
    "/baton.v1.Inference/Generate": _CLIENTS,
    "/baton.v1.Inference/Complete": _CLIENTS,
    "/baton.v1.Inference/Tokenize": _CLIENTS,
    "/baton.v1.Inference/Detokenize": _CLIENTS,
    "/baton.v1.Inference/Embed": _CLIENTS,
    "/baton.v1.Inference/Score": _CLIENTS,
    "/baton.v1.Inference/GetModelInfo": _CLIENTS,
    "/baton.v1.Inference/ListModels": _CLIENTS,
    "/baton.v1.Fleet/ListWorkers": _OPERATORS,
    "/baton.v1.Fleet/ListRequests": _OPERATORS,
    "/baton.v1.Fleet/AddModel": _OPERATORS,
    "/baton.v1.Fleet/RemoveModel": _OPERATORS,
    "/baton.v1.Launcher/StartWorkers": _OPERATORS,
    "/baton.v1.Launcher/DrainWorker": _OPERATORS,
    "/baton.v1.Launcher/WatchWorkers": _OPERATORS,
    "/baton.v1.Registration/Register": _WORKERS,
    "/baton.v1.Worker/Session": _FLEET,
    "/baton.v1.Worker/Describe": _FLEET,
    "/baton.v1.Worker/Drain": _FLEET,
    "/baton.v1.Worker/LoadAdapter": _OPERATORS,
    "/baton.v1.Worker/UnloadAdapter": _OPERATORS,
    "/baton.kv.Raw/Pull": _WORKERS,
    "/baton.rank.Raw/Join": frozenset((RANK,)),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _CLIENTS | _WORKERS | _FLEET,
    "/grpc.health.v1.Health/Check": ANYONE,
    "/grpc.health.v1.Health/Watch": ANYONE,
}

log = logging.getLogger(__name__)
_tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default=DEFAULT_TENANT)


def tenant() -> str:
    """Return the tenant of the current call by its credential; `default` if no credentials are configured."""
    return _tenant.get()


class Guard(grpc.aio.ServerInterceptor):
    """The interceptor of one server. `credentials` None: callers have certificates only. `slots` bounds the open calls.
    `is_open`: any caller may call everything. `num_denied` counts by (method, reason), with the method "other" if the
    table does not list it."""

    def __init__(self, credentials: Credentials | None = None, slots: CallSlots | None = None, is_open: bool = False):
        self.num_denied: Counter[tuple[str, str]] = Counter()
        self.slots = slots or CallSlots()
        self._refusals, self._resets = Refusals(), Resets()
        self._credentials, self._is_open = credentials, is_open
        # One for all calls of a method and tenant: making it for each took 1 KiB of an open stream.
        self._guarded = functools.lru_cache(_MAX_GUARDED)(self._guard)

    async def intercept_service(self, continuation, handler_call_details):
        allowed = METHODS.get(handler_call_details.method)
        try:  # all of this before a message is read
            _check_metadata(handler_call_details.invocation_metadata)
            presented = [
                str(value) for key, value in handler_call_details.invocation_metadata or () if key == "authorization"
            ]
            tenant = self.identify(presented, allowed or frozenset())
        except BatonError as error:
            return self._refusal(handler_call_details.method, error)
        if allowed is None:
            return self._unlisted(handler_call_details.method, tenant)
        handler = await continuation(handler_call_details)
        return handler and self._guarded(handler, handler_call_details.method, allowed, tenant)

    def identify(self, presented: Sequence[str], allowed: frozenset[str]) -> str | None:
        """Return the tenant of the credential in `presented`, the values of `authorization`; None without one. Raises
        Unauthenticated if a method requires one and it is not valid."""
        if not presented or self._credentials is None:
            return None
        scheme, _, bearer = presented[0].partition(" ")
        try:
            if len(presented) > 1 or scheme.lower() != "bearer":
                raise Unauthenticated("authorization must be one `Bearer KEY`")
            return self._credentials.tenant(bearer.strip(" "))
        except Unauthenticated:
            if allowed == ANYONE:
                return None
            raise

    def _guard(self, handler, method: str, allowed: frozenset[str], tenant: str | None):
        """Return the handler with all checks in front of it. It takes a stream whatever the method's kind, since gRPC
        would read a single message before it calls us. It is never a generator, which would release what it holds only
        when it is collected."""
        stream = "stream" if handler.response_streaming else "unary"
        serve = getattr(handler, f"{'stream' if handler.request_streaming else 'unary'}_{stream}")
        is_generator = inspect.isasyncgenfunction(serve)

        async def guarded(unread, context):
            messages = _Messages(context)
            with _ABORTED, await self._enter(context, method, allowed, tenant) as slot:
                message = await self._read(slot.first(messages.__anext__), context, method)
                if handler.request_streaming:
                    message = self._from(message, messages, context, method)
                try:
                    responses = serve(message, context)
                    if not is_generator:
                        return await responses
                    async with contextlib.aclosing(responses):
                        async for response in responses:
                            await context.write(response)
                except BatonError as error:
                    await abort(context, error)

        make = getattr(grpc, f"stream_{stream}_rpc_method_handler")
        return make(guarded, _readable(handler.request_deserializer), handler.response_serializer)

    async def _enter(self, context, method: str, allowed: frozenset[str], tenant: str | None) -> CallSlot:
        """Return the slot of a call. Aborts the call if its caller lacks the role or has too many open calls."""
        try:
            return self.enter(method, allowed, tenant, self._roles(context), context.peer())
        except BatonError as error:
            await self.pace_refusal(error)
            await self._deny(context, method, error)

    def _roles(self, context) -> frozenset[str]:
        return frozenset() if self._is_open else roles_of(context.auth_context())

    def enter(
        self, method: str, allowed: frozenset[str], tenant: str | None, roles: frozenset[str], peer: str
    ) -> CallSlot:
        """Return the slot of a call that begins, and set its tenant as the current one. Raises Unauthenticated,
        PermissionDenied or Overloaded."""
        names = roles | ({TENANT} if tenant else set())
        if not (self._is_open or allowed == ANYONE or allowed & names):
            raise _why(names, allowed)
        _tenant.set(tenant or DEFAULT_TENANT)
        caller = tenant or (DEFAULT_TENANT if TENANT in allowed else roles or None)
        return self.slots.enter(method, caller, peer)

    async def pace_refusal(self, error: BatonError) -> None:
        """Wait until the caller's tenant may be refused again; do not wait on a server without credentials, where all
        callers are one tenant."""
        if self._credentials is not None and isinstance(error, Overloaded):
            await self._refusals.hold(tenant())

    async def _read(self, message: Awaitable, context, method: str):
        """Return the awaited message. Aborts the call if it does not arrive or is invalid."""
        try:
            return await message
        except BatonError as error:
            await self._deny(context, method, error)

    async def _from(self, first, rest: AsyncIterator, context, method: str) -> AsyncIterator:
        yield first
        while True:
            try:
                yield await self._read(anext(rest), context, method)
            except StopAsyncIteration:
                return

    def _refusal(self, method: str, error: BatonError):
        """Return a handler that ends a call of any kind with `error`, and reads nothing."""

        async def refuse(requests, context) -> None:
            with _ABORTED:
                await self._deny(context, method, error)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _unlisted(self, method: str, tenant: str | None):
        """Return a handler that ends a call of a method that the table does not list. A known caller gets gRPC's own
        status: tools ask for the newest version of reflection first, and continue only after this status."""

        async def end(requests, context) -> None:
            with _ABORTED:
                if self._is_open or tenant or self._roles(context):
                    async with self._resets:
                        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
                await self._deny(context, method, PermissionDenied("no caller may use this method"))

        return grpc.stream_stream_rpc_method_handler(end)

    async def _deny(self, context, method: str, error: BatonError) -> NoReturn:
        self.note_denied(method, error, context.peer())
        async with self._resets:
            await abort(context, error)

    def note_denied(self, method: str, error: BatonError, peer: str) -> None:
        """Count and log a call that is refused before it is served."""
        known = method if method in METHODS else "other"
        self.num_denied[known, error.reason] += 1
        num = self.num_denied[known, error.reason]
        if num & (num - 1) == 0:  # 1, 2, 4, 8, ...: strangers do not fill the log
            log.warning("denied %s", fields(method=known, reason=error.reason, peer=peer, num=num))


class _Messages:
    """Iterate over the messages of a caller. gRPC's own iterator and its call refer to each other: such a cycle keeps a
    call that was not read to its end, about 400 calls of a busy gateway, until the garbage collector runs."""

    __slots__ = ("_context",)

    def __init__(self, context: grpc.aio.ServicerContext):
        self._context = context

    def __aiter__(self) -> "_Messages":
        return self

    async def __anext__(self):
        message = await self._context.read()
        if message is grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
            raise StopAsyncIteration
        return message


class _Aborted:
    """End a handler whose call was aborted. gRPC keeps the AbortError with the call and raises it again; the frames of
    its traceback refer to the call, a cycle that would keep each refused call until the garbage collector runs."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, grpc.aio.AbortError):
            error.__traceback__ = error.__context__ = None
            return True
        return False


_ABORTED = _Aborted()


def _readable(deserialize: Callable | None) -> Callable | None:
    """Wrap a deserializer to blame the sender for bytes that are no valid message; gRPC would log a traceback for
    each."""
    if deserialize is None:
        return None

    def read(data: bytes):
        try:
            return deserialize(data)
        except DecodeError:
            raise InvalidRequest("message", "these bytes are not what this method takes") from None

    return read


def _check_metadata(metadata) -> None:
    """Check the number of metadata entries; gRPC itself bounds their bytes, with the same status. Raises BatonError
    without a retry delay."""
    if metadata and len(metadata) > MAX_METADATA_PAIRS:
        message = f"the call has {len(metadata)} metadata entries, at most {MAX_METADATA_PAIRS} are allowed"
        raise BatonError(message, code=grpc.StatusCode.RESOURCE_EXHAUSTED, reason="METADATA_TOO_LARGE")


def _why(names: frozenset[str], allowed: frozenset[str]) -> BatonError:
    if not names:
        what = "a credential (authorization: Bearer KEY)" if TENANT in allowed else "a certificate with a role"
        return Unauthenticated(f"this method asks for {what}")
    return PermissionDenied(f"open to {', '.join(sorted(allowed))}; the caller is {', '.join(sorted(names))}")
