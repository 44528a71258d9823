"""Answers of a decode worker that takes its time, so that they have a middle."""

import time
from contextlib import asynccontextmanager

from baton.engine.core.request import Key
from baton.v1 import worker_pb2 as pb
from tests.support.worker.scripted import Answer, Pair, Session, make_spec, run_worker

MAX_TOKENS = 120
WHOLE = Key("whole")  # what others are compared with comes quickly
PROMPT = [9 + i % 700 for i in range(150)]
SAMPLINGS = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 5},
    "choices": {"temperature": 0.9, "seed": 6, "n": 3},
    "logprobs": {"temperature": 0.7, "seed": 7, "logprobs": 2},
}


@asynccontextmanager
async def decode_worker(model, step_s: float = 0.0, **options):
    """With a loop that takes its time, so that an answer has a middle."""
    async with run_worker(model, "decode", **options) as worker:
        step = worker.engine.step

        def slow_step():
            time.sleep(0.0 if WHOLE in worker.dispatcher.legs else step_s)
            return step()

        worker.engine.step = slow_step
        try:
            yield worker, f"127.0.0.1:{worker.port}"
        finally:
            worker.engine.check_integrity()


async def whole(target: str, spec: pb.RequestSpec) -> Answer:
    session = await Session(target).open()
    answer = await Pair(session, session).generate_here("whole", spec)
    await session.close()
    return answer


async def begin(session: Session, name: str, spec: pb.RequestSpec, num_rows: int) -> Answer:
    """An answer up to some rows."""
    answer, key = Answer(), pb.Key(request_id=name, attempt=1)
    await session.send(admit=pb.Admit(key=key, spec=spec))
    await session.next(name, "granted")
    await session.send(prefill=pb.Prefill(key=key))
    answer.add_first(await session.next(name, "done"))
    for _ in range(num_rows):
        answer.add_row(await session.next(name, "row"))
    return answer


def spec_of(sampling: str) -> pb.RequestSpec:
    spec = make_spec(PROMPT, max_tokens=MAX_TOKENS, **SAMPLINGS[sampling])
    spec.fingerprint = b"f"
    return spec
