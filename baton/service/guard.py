"""Who may call what: one table for all servers, and the interceptor that holds calls to it.

Nothing is allowed that does not stand in the table. A caller is a tenant by its credential, or has the roles of its
certificate; a server with neither certificates nor credentials, which settings permit on loopback only, has no guard,
and all its callers are the tenant `default`.
"""

import contextvars
import inspect
import logging
from collections import Counter
from collections.abc import Callable
from typing import NoReturn

import grpc

from baton.service.credentials import Credentials
from baton.service.errors import BatonError, InvalidRequest, PermissionDenied, Unauthenticated, abort
from baton.service.logs import fields
from baton.service.tls import DECODE, GATEWAY, OPERATOR, PREFILL, roles_of

DEFAULT_TENANT = "default"
TENANT = "tenant"  # whoever has a credential
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
    "/baton.v1.Inference/GetModelInfo": _CLIENTS,
    "/baton.v1.Fleet/ListWorkers": _OPERATORS,
    "/baton.v1.Fleet/ListRequests": _OPERATORS,
    "/baton.v1.Registration/Register": _WORKERS,
    "/baton.v1.Worker/Session": _FLEET,
    "/baton.v1.Worker/Describe": _FLEET,
    "/baton.v1.Worker/Drain": _FLEET,
    "/baton.kv.Raw/Pull": _WORKERS,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _CLIENTS | _WORKERS | _FLEET,
    "/grpc.health.v1.Health/Check": ANYONE,
    "/grpc.health.v1.Health/List": ANYONE,
    "/grpc.health.v1.Health/Watch": ANYONE,
}

log = logging.getLogger(__name__)
_tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default=DEFAULT_TENANT)


def tenant() -> str:
    """Of the call that runs here, by its credential; `default` where there are none."""
    return _tenant.get()


class Guard(grpc.aio.ServerInterceptor):
    """`credentials` None: there are certificates alone. `num_denied` counts by (method, reason); a method that is not
    in the table counts as "other". `on_denied(method, reason)` is called for each."""

    def __init__(self, credentials: Credentials | None):
        self.num_denied: Counter[tuple[str, str]] = Counter()
        self.on_denied: Callable[[str, str], None] = lambda method, reason: None
        self._credentials = credentials

    async def intercept_service(self, continuation, details):
        allowed = METHODS.get(details.method)
        if allowed == ANYONE:
            return await continuation(details)
        if allowed is None:
            return self._refusal(details.method, PermissionDenied("this method is open to nobody"))
        try:
            tenant = self._tenant(details.invocation_metadata)
        except Unauthenticated as error:  # said before the message is read
            return self._refusal(details.method, error)
        handler = await continuation(details)
        return handler and self._guarded(handler, details.method, allowed, tenant)

    def _tenant(self, metadata) -> str | None:
        """Of the bearer's credential; None: it shows none. Raises Unauthenticated."""
        shown = [value for key, value in metadata or () if key == "authorization"]
        if not shown or self._credentials is None:
            return None
        scheme, _, bearer = str(shown[0]).partition(" ")
        if len(shown) > 1 or scheme.lower() != "bearer":
            raise Unauthenticated("authorization must be one `Bearer KEY`")
        return self._credentials.tenant(bearer.strip())

    def _guarded(self, handler, method: str, allowed: frozenset[str], tenant: str | None):
        """The same handler, behind the table. It takes a stream whatever the method's kind: gRPC would read a single
        message before it calls us, or wait for it in one of the places that there are for calls."""
        stream = "stream" if handler.response_streaming else "unary"
        serve = getattr(handler, f"{'stream' if handler.request_streaming else 'unary'}_{stream}")

        async def admit(requests, context):
            names = roles_of(context.auth_context()) | ({TENANT} if tenant else set())
            if not allowed & names:
                await self._deny(context, method, _why(names, allowed))
            _tenant.set(tenant or DEFAULT_TENANT)
            if handler.request_streaming:
                return requests
            async for request in requests:
                return request
            await abort(context, InvalidRequest("message", "there is none"))

        if inspect.isasyncgenfunction(serve):

            async def guarded(requests, context):
                async for response in serve(await admit(requests, context), context):
                    yield response
        else:

            async def guarded(requests, context):
                return await serve(await admit(requests, context), context)

        make = getattr(grpc, f"stream_{stream}_rpc_method_handler")
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    def _refusal(self, method: str, error: BatonError):
        """Ends the call whatever its kind, and reads nothing of it."""

        async def refuse(requests, context) -> None:
            await self._deny(context, method, error)

        return grpc.stream_stream_rpc_method_handler(refuse)

    async def _deny(self, context, method: str, error: BatonError) -> NoReturn:
        known = method if method in METHODS else "other"
        self.num_denied[known, error.reason] += 1
        self.on_denied(known, error.reason)
        num = self.num_denied[known, error.reason]
        if num & (num - 1) == 0:  # 1, 2, 4, 8, ...: strangers do not fill the log
            log.warning("denied %s", fields(method=known, reason=error.reason, peer=context.peer(), num=num))
        await abort(context, error)


def _why(names: frozenset[str], allowed: frozenset[str]) -> BatonError:
    if not names:
        what = "a credential (authorization: Bearer KEY)" if TENANT in allowed else "a certificate with a role"
        return Unauthenticated(f"this method asks for {what}")
    return PermissionDenied(f"open to {', '.join(sorted(allowed))}; the caller is {', '.join(sorted(names))}")
