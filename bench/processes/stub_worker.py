"""A decode worker that computes nothing, for bench/gateway.py: python -m bench.processes.stub_worker --model DIR [...].

It grants credit and ends prefill immediately, then gives every sequence one token per step, all of a step in one
message. A token's id tells its step (FIRST_ID + step % NUM_IDS), and the times of all steps (monotonic) are written to
--log at the end, so a client can compute how long a token took."""

import argparse
import asyncio
import hashlib
import json
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from baton.protocol import PREFILL_ON_ADMIT
from baton.service.net import server as grpc_server
from baton.v1 import inference_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb

FIRST_ID, NUM_IDS = 100, 3000
LOAD_S = 0.25


@dataclass
class Sequence:
    """A sequence; `index` is the output index of the next token."""

    key: pb.Key
    max_tokens: int
    index: int = 0
    started_at: float = 0.0


class Session:
    """The session of one gateway."""

    def __init__(self, context):
        self.context = context
        self.outbox: asyncio.Queue[pb.Event] = asyncio.Queue()
        self.admitted: dict[tuple[str, int], Sequence] = {}
        self.running: dict[tuple[str, int], Sequence] = {}


class StubWorker(worker_pb2_grpc.WorkerServicer):
    def __init__(self, model: Path, step_s: float, is_full: bool):
        config = json.loads((model / "config.json").read_text())
        digest = hashlib.sha256((model / "tokenizer.json").read_bytes()).digest()
        self.hello = pb.Hello(
            protocol_min=1, protocol_max=1, instance=secrets.token_bytes(16), epoch=secrets.randbits(64), roles=["decode"],
            model_identity=hashlib.sha256(b"stub").digest(), tokenizer_digest=digest, numerics_class="stub", host_id="stub",
        )  # fmt: skip
        self.hello.limits.max_model_len = self.hello.model.context = config["max_position_embeddings"]
        self.hello.features.append(PREFILL_ON_ADMIT)
        self.hello.limits.max_num_seqs = 1 << 16
        self.hello.model.vocab_size = config["vocab_size"]
        self.step_times: list[float] = []
        self._step_s, self._is_full = step_s, is_full
        self._sessions: set[Session] = set()

    async def Session(self, commands, context):
        session = Session(context)
        self._sessions.add(session)
        writing = asyncio.create_task(self._write(session))
        try:
            async for command in commands:
                self._obey(session, command)
        finally:
            self._sessions.discard(session)
            writing.cancel()

    async def _write(self, session: Session) -> None:
        while True:
            await session.context.write(await session.outbox.get())

    def _obey(self, session: Session, command: pb.Command) -> None:
        kind = command.WhichOneof("kind")
        message = getattr(command, kind)
        if kind == "hello":
            session.outbox.put_nowait(pb.Event(hello=self.hello))
            session.outbox.put_nowait(
                pb.Event(load=pb.Load(state="serving", num_blocks_free=1 << 20, num_blocks_total=1 << 20))
            )
        elif kind == "admit":
            self._admit(session, message)
        elif kind == "prefill":
            self._prefill(session, message.key)
        elif kind == "cancel":
            self._end(session, message.key, 1)

    def _admit(self, session: Session, message: pb.Admit) -> None:
        if self._is_full:
            refused = pb.Refused(key=message.key, reason="kv_full", retry_after_ms=1000)
            session.outbox.put_nowait(pb.Event(refused=refused))
            return
        session.admitted[_named(message.key)] = Sequence(message.key, message.spec.max_tokens)
        session.outbox.put_nowait(pb.Event(granted=pb.Granted(key=message.key)))
        if message.prefill:
            self._prefill(session, message.key)

    def _prefill(self, session: Session, key: pb.Key) -> None:
        sequence = session.admitted.pop(_named(key), None)
        if sequence is None:
            return
        is_last = sequence.max_tokens == 1
        reason = inference_pb2.FINISH_REASON_LENGTH if is_last else 0
        first = pb.FirstToken(choice=0, token_id=FIRST_ID, finished=is_last, finish_reason=reason)
        session.outbox.put_nowait(pb.Event(done=pb.Done(key=key, first_tokens=[first], num_chunks=1)))
        sequence.index, sequence.started_at = 1, time.monotonic()
        session.running[_named(key)] = sequence
        if is_last:
            self._end(session, key, 0)

    def _end(self, session: Session, key: pb.Key, code: int) -> None:
        known = session.running.pop(_named(key), None) or session.admitted.pop(_named(key), None)
        if known is not None:
            reason = "CANCELLED" if code else ""
            decode_s = time.monotonic() - known.started_at if known.started_at else 0.0
            report = pb.DecodeReport(num_steps=known.index, decode_s=decode_s)
            ended = pb.Ended(key=key, code=code, reason=reason, decode=report)
            session.outbox.put_nowait(pb.Event(ended=ended))

    async def steps(self) -> None:
        """Run steps endlessly; a late step does not shift later ones."""
        loop = asyncio.get_running_loop()
        next_at, load_at = loop.time(), 0.0
        while True:
            next_at = max(next_at + self._step_s, loop.time() - self._step_s)
            await asyncio.sleep(next_at - loop.time())
            now = time.monotonic()
            for session in self._sessions:
                if session.running:
                    self._step(session, len(self.step_times))
                if now >= load_at:
                    load = pb.Load(
                        state="serving",
                        num_running=len(session.running),
                        num_blocks_free=1 << 20,
                        num_blocks_total=1 << 20,
                    )
                    session.outbox.put_nowait(pb.Event(load=load))
            load_at = now + LOAD_S if now >= load_at else load_at
            self.step_times.append(now)

    def _step(self, session: Session, number: int) -> None:
        sequences = list(session.running.values())
        num = len(sequences)
        output = pb.StepOutput(keys=[sequence.key for sequence in sequences])
        output.key_index.extend(range(num))
        output.choice.extend([0] * num)
        output.first_index.extend(sequence.index for sequence in sequences)
        output.num_ids.extend([1] * num)
        output.token_ids.extend([FIRST_ID + number % NUM_IDS] * num)
        output.has_logprobs.extend([False] * num)
        for sequence in sequences:
            sequence.index += 1
        length = inference_pb2.FINISH_REASON_LENGTH
        output.finish_reason.extend(length if sequence.index == sequence.max_tokens else 0 for sequence in sequences)
        session.outbox.put_nowait(pb.Event(step_output=output))
        for sequence in sequences:
            if sequence.index == sequence.max_tokens:
                self._end(session, sequence.key, 0)


def _named(key: pb.Key) -> tuple[str, int]:
    return key.request_id, key.attempt


async def serve(arguments: argparse.Namespace) -> None:
    worker = StubWorker(arguments.model, arguments.step_ms / 1000, arguments.full)
    server = grpc_server.make_server()
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    port = grpc_server.bind(server, "127.0.0.1:0")
    await server.start()
    print(f"ready grpc=127.0.0.1:{port}", flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    stepping = asyncio.create_task(worker.steps())
    await stop.wait()
    stepping.cancel()
    await server.stop(0)
    if arguments.log:
        arguments.log.write_text(json.dumps(worker.step_times))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--full", action="store_true", help="refuse every request")
    parser.add_argument("--log", type=Path)
    uvloop.install()
    asyncio.run(serve(parser.parse_args()))
