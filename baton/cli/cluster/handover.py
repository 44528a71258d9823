"""One prompt through a prefill and a decode worker, as a gateway would send it: real blocks, really moved."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from typing import NamedTuple

import grpc

from baton.protocol import INSTANCE_BYTES, PROTOCOL
from baton.service.codec import budget_ms
from baton.v1 import kv_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from kvtransfer.naming import HASH_BYTES, SpanHash, chain_hashes

_GREETING_S = 5.0
_MOST_TOKENS = 2048
_MEASURED_S = 0.5  # of reading a prompt
_COPY_BYTES = 64 << 20
_RENEW_S = 0.3  # of a lease of 5 s, or less where an operator says so


class HandoverFailed(Exception):
    """One line: which worker said what."""


class Handover(NamedTuple):
    transport: str
    num_tokens: int
    num_bytes: int
    transfer_s: float
    ttft_s: float  # from the first command to the first token
    token_ids: tuple[int, ...]

    def rate_beside(self, bytes_per_s: float) -> str:
        """Describe the rate, beside a copy of `bytes_per_s`."""
        rate = self.num_bytes / max(self.transfer_s, 1e-9)
        return (
            f"{self.transport}: {self.num_bytes / 1e6:.1f} MB at {rate / 1e9:.2f} GB/s, "
            f"{rate / bytes_per_s:.2f} of this machine's copy ({bytes_per_s / 1e9:.1f} GB/s)"
        )


class Session:
    """A worker's session as a client of it. `async with`."""

    def __init__(self, channel: grpc.aio.Channel, address: str):
        self.address = address
        self._stub = worker_pb2_grpc.WorkerStub(channel)

    async def __aenter__(self) -> Session:
        self._call = self._stub.Session()
        hello = pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, instance=secrets.token_bytes(INSTANCE_BYTES))
        await self._call.write(pb.Command(hello=hello))
        try:
            async with asyncio.timeout(_GREETING_S):
                self.hello = (await self._read()).hello
        except TimeoutError:
            self._call.cancel()
            raise HandoverFailed(f"{self.address} opens a session but does not answer its Hello") from None
        return self

    async def __aexit__(self, *exc) -> None:
        self._call.cancel()

    async def send(self, **command) -> None:
        """Raises HandoverFailed where the session has ended."""
        if self._call.done():
            raise self._closed()
        await self._call.write(pb.Command(**command))

    async def expect(self, kind: str, key: pb.Key):
        """The next event of this kind of this key. Raises HandoverFailed when the key is refused or ends first."""
        while True:
            event = await self._read()
            name = event.WhichOneof("kind")
            message = getattr(event, name)
            if key not in getattr(message, "keys", [getattr(message, "key", None)]):
                continue  # of a handover before
            if name == kind:
                return message
            if name == "refused":
                raise HandoverFailed(f"{self.address} refuses it: {message.reason}")
            if name == "ended":
                raise HandoverFailed(f"{self.address} ends it: {message.message or message.reason}")

    async def _read(self) -> pb.Event:
        event = await self._call.read()
        if event is grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
            raise self._closed()
        return event

    def _closed(self) -> HandoverFailed:
        return HandoverFailed(f"{self.address} closed the session")


async def prove(prefill: Session, decode: Session, timeout_s: float) -> Handover:
    """Two blocks and a token of a third, fetched while they are computed, as a gateway does it.
    Raises HandoverFailed, TimeoutError, AioRpcError."""
    num_tokens = 2 * max(prefill.hello.limits.block_size, decode.hello.limits.block_size) + 1
    return await hand_over(prefill, decode, num_tokens, None, True, timeout_s)


async def measure(
    prefill: Session, decode: Session, transport: str | None, proof: Handover, timeout_s: float
) -> Handover:
    """As many tokens as the prefill worker reads in half a second, by what `proof` took; all KV is written before it is
    fetched, so that the rate is the transport's. `transport` None: the decode worker chooses. Raises as `prove`."""
    num_tokens = max(proof.num_tokens, round(_MEASURED_S * proof.num_tokens / proof.ttft_s))
    return await hand_over(prefill, decode, min(num_tokens, _MOST_TOKENS), transport, False, timeout_s)


async def hand_over(
    prefill: Session, decode: Session, num_tokens: int, transport: str | None, is_early: bool, timeout_s: float
) -> Handover:
    """A new prompt of at most so many tokens, fetched while it is computed where `is_early`, else once all of it is.
    Raises as `prove`."""
    key = pb.Key(request_id=f"doctor-{secrets.token_hex(8)}", attempt=1)
    spec = _spec(prefill.hello, decode.hello, num_tokens, time.monotonic() + timeout_s)
    begun = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            await decode.send(admit=pb.Admit(key=key, spec=spec))
            await decode.expect("granted", key)
            await prefill.send(prefill=pb.Prefill(key=key, spec=spec, taker=_taker(decode.hello)))
            accepted = await prefill.expect("accepted", key)
            fetch = pb.Fetch(key=key, handle=_only(accepted.handle, transport), ticket=accepted.ticket)
            if is_early:
                await decode.send(fetch=fetch)
            done = await _renewing(prefill, key, accepted.lease_id)
            ttft_s = time.monotonic() - begun
            if not is_early:
                await decode.send(fetch=fetch)
            fetched = await decode.expect("fetched", key)
            await decode.send(start=pb.Start(key=key, first_tokens=done.first_tokens))
            output = await decode.expect("step_output", key)
    finally:
        for session in (prefill, decode):
            with contextlib.suppress(HandoverFailed):  # one that has ended keeps nothing
                await session.send(cancel=pb.Cancel(key=key))
    token_ids = (done.first_tokens[0].token_id, *output.token_ids)
    return Handover(fetched.transport, fetched.num_tokens, fetched.num_bytes, fetched.transfer_s, ttft_s, token_ids)


async def _renewing(prefill: Session, key: pb.Key, lease_id: bytes) -> pb.Done:
    """Wait for the prompt to be read, and keep its KV meanwhile."""
    done = asyncio.ensure_future(prefill.expect("done", key))
    try:
        while not (await asyncio.wait((done,), timeout=_RENEW_S))[0]:
            await prefill.send(renew_lease=pb.RenewLease(key=key, lease_id=lease_id))
        return await done
    finally:
        done.cancel()


def _spec(prefill: pb.Hello, decode: pb.Hello, num_tokens: int, deadline: float) -> pb.RequestSpec:
    """Return new tokens under a root of their own, so that no cache answers instead of the transport."""
    room = min(prefill.limits.max_model_len, decode.limits.max_model_len) - 8
    token_ids = random.choices(range(min(prefill.model.vocab_size, decode.model.vocab_size)), k=min(room, num_tokens))
    root = SpanHash(secrets.token_bytes(HASH_BYTES))
    hashes = chain_hashes(root, token_ids)
    return pb.RequestSpec(
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        span_hashes=hashes,
        chain_parent=hashes[-1] if hashes else root,
        sampling=pb.WorkerSampling(top_p=1.0, repetition_penalty=1.0, n=1),
        max_tokens=2,
        budget_ms=budget_ms(deadline),
    )


def _taker(hello: pb.Hello) -> kv_pb2.Taker:
    return kv_pb2.Taker(
        instance=hello.instance,
        epoch=hello.epoch,
        layout=hello.layout,
        numerics_class=hello.numerics_class,
    )


def _only(handle: bytes, transport: str | None) -> bytes:
    """The handle with the endpoints of one transport."""
    if transport is None:
        return handle
    message = kv_pb2.KVHandle.FromString(handle)
    for part in message.parts:
        kept = [endpoint for endpoint in part.endpoints if endpoint.transport == transport]
        del part.endpoints[:]
        part.endpoints.extend(kept)
    return message.SerializeToString()


def copy_rate() -> float:
    """Return the bytes a second of a plain copy, best of a few."""
    import numpy as np

    source, target = np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)
    times = []
    for _ in range(4):
        begun = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begun)
    return _COPY_BYTES / min(times)
