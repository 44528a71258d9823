"""Hand one prompt from a prefill to a decode worker with the messages that a gateway would send; real blocks move."""

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
_RENEW_S = 0.3  # for a lease of 5 s, or shorter if an operator says so


class HandoverFailed(Exception):
    """A worker refused or ended the handover; one line that names it and its reason."""


class Handover(NamedTuple):
    transport: str
    num_tokens: int
    num_bytes: int
    transfer_s: float
    ttft_s: float  # from the first command to the first token
    token_ids: tuple[int, ...]

    def rate_beside(self, bytes_per_s: float) -> str:
        """Return a line with the transfer rate, compared with a memory copy of `bytes_per_s`."""
        rate = self.num_bytes / max(self.transfer_s, 1e-9)
        return (
            f"{self.transport}: {self.num_bytes / 1e6:.1f} MB at {rate / 1e9:.2f} GB/s, "
            f"{rate / bytes_per_s:.2f} of this machine's copy ({bytes_per_s / 1e9:.1f} GB/s)"
        )


class Session:
    """A session with one worker, as a gateway has; used with `async with`."""

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
        """Send a command. Raises HandoverFailed if the session has ended."""
        if self._call.done():
            raise self._closed()
        await self._call.write(pb.Command(**command))

    async def expect(self, kind: str, key: pb.Key):
        """Return the next event of this kind for this key. Raises HandoverFailed if the key is refused or ends
        first."""
        while True:
            event = await self._read()
            name = event.WhichOneof("kind")
            message = getattr(event, name)
            if key not in getattr(message, "keys", [getattr(message, "key", None)]):
                continue  # the event belongs to an earlier handover
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
    """Hand over two blocks and one more token while they are computed, as a gateway does.

    Raises HandoverFailed, TimeoutError, AioRpcError."""
    num_tokens = 2 * max(prefill.hello.limits.block_size, decode.hello.limits.block_size) + 1
    return await hand_over(prefill, decode, num_tokens, None, True, timeout_s)


async def measure(
    prefill: Session, decode: Session, transport: str | None, proof: Handover, timeout_s: float
) -> Handover:
    """Hand over as many tokens as the prefill worker reads in half a second, by the times of `proof`. All KV is written
    before it is fetched, so the rate is the transport's. `transport` None: the decode worker chooses. Raises as
    `prove`."""
    num_tokens = max(proof.num_tokens, round(_MEASURED_S * proof.num_tokens / proof.ttft_s))
    return await hand_over(prefill, decode, min(num_tokens, _MOST_TOKENS), transport, False, timeout_s)


async def hand_over(
    prefill: Session, decode: Session, num_tokens: int, transport: str | None, is_early: bool, timeout_s: float
) -> Handover:
    """Hand over a new prompt of at most `num_tokens`, fetched while it is computed if `is_early`, else afterwards.
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
            with contextlib.suppress(HandoverFailed):  # a session that has ended keeps nothing
                await session.send(cancel=pb.Cancel(key=key))
    token_ids = (done.first_tokens[0].token_id, *output.token_ids)
    return Handover(fetched.transport, fetched.num_tokens, fetched.num_bytes, fetched.transfer_s, ttft_s, token_ids)


async def _renewing(prefill: Session, key: pb.Key, lease_id: bytes) -> pb.Done:
    """Wait until the prompt is read, and renew the lease of its KV meanwhile."""
    done = asyncio.ensure_future(prefill.expect("done", key))
    try:
        while not (await asyncio.wait((done,), timeout=_RENEW_S))[0]:
            await prefill.send(renew_lease=pb.RenewLease(key=key, lease_id=lease_id))
        return await done
    finally:
        done.cancel()


def _spec(prefill: pb.Hello, decode: pb.Hello, num_tokens: int, deadline: float) -> pb.RequestSpec:
    """Return random tokens under a new root, so that no cache can answer instead of the transport."""
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
    """Return the handle with the endpoints of one transport only."""
    if transport is None:
        return handle
    message = kv_pb2.KVHandle.FromString(handle)
    for part in message.parts:
        kept = [endpoint for endpoint in part.endpoints if endpoint.transport == transport]
        del part.endpoints[:]
        part.endpoints.extend(kept)
    return message.SerializeToString()


def copy_rate() -> float:
    """Return the bytes per second of a plain memory copy, the best of four."""
    import numpy as np

    source, target = np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)
    times = []
    for _ in range(4):
        begun = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begun)
    return _COPY_BYTES / min(times)
