"""Half a worker, without a server, sessions or the engine's thread: keys of one role over an engine and KV transfer."""

import asyncio
import shutil

import pytest
import torch

import decode_worker.states
import prefill_worker.states
from baton.engine.core.request import Key, Request, SamplingParams
from baton.service.security.guard import Guard
from baton.service.settings import make_settings
from baton.v1 import worker_pb2 as pb
from baton.worker.app import load_engine
from baton.worker.hello import make_hello, new_identity
from baton.worker.kv.pool_memory import PoolMemory
from baton.worker.kv_endpoints import KVEndpoints
from baton.worker.session.leg_dispatcher import LegDispatcher
from baton.worker.session.leg_machine import LegMachine, Table
from baton.worker.session.table import join_tables
from baton.worker.settings import WorkerSettings
from tests.support import bare_engine
from tests.support.model_folders.families import make_folder
from tests.support.models import make_model
from tests.support.worker.fakes import FakeOutbox
from tests.support.worker.scripted import make_spec, run_bounded, taker_of

KEY = pb.Key(request_id="one")
PROMPT = [5 + (i * i * 31 + i * 17) % 1000 for i in range(150)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


class Half:
    """The keys of one role; the test steps the engine."""

    def __init__(self, model, rows: Table, **options):
        options = {"model": model, "num_blocks": 64, "threads": 1} | options
        self.settings = settings = make_settings(WorkerSettings, options)
        self.memory = PoolMemory()
        self.engine = load_engine(settings.engine, self.memory)
        self.identity = new_identity(self.engine)
        self.transfer = KVEndpoints(self.engine, self.memory, self.identity, settings, Guard(is_open=True))
        self.ended: list = []
        machine = LegMachine(
            join_tables(rows), self.engine, self.transfer.handoff, self.transfer.intake, on_change=lambda: None,
            on_ended=self.ended.append, resume_window_s=1.0,
        )  # fmt: skip
        self.dispatcher = LegDispatcher(machine)
        self.outbox = FakeOutbox()

    async def __aenter__(self) -> "Half":
        await self.transfer.start()
        return self

    async def __aexit__(self, *exc) -> None:
        await self.transfer.stop()
        self.memory.close()

    def hello(self) -> pb.Hello:
        return make_hello(self.engine, "", self.identity, b"", self.transfer)

    def dispatch(self, **command) -> None:
        self.dispatcher.dispatch(self.outbox, pb.Command(**command))

    async def until(self, kind: str):
        """Step until the gateway would read an event of this kind."""
        while kind not in self.outbox.kinds():
            self.dispatcher.on_outputs(self.engine.step())
            await asyncio.sleep(0)
        return self.outbox.only(kind)


def test_two_halves_answer_as_one_engine(model):
    async def main():
        prefill = Half(model, prefill_worker.states.TRANSITIONS)
        decode = Half(model, decode_worker.states.TRANSITIONS)
        async with prefill, decode:
            spec = make_spec(PROMPT, max_tokens=9)
            decode.dispatch(admit=pb.Admit(key=KEY, spec=spec))
            taker = taker_of(decode.hello())
            prefill.dispatch(prefill=pb.Prefill(key=KEY, spec=spec, taker=taker))
            accepted = prefill.outbox.only("accepted")
            decode.dispatch(fetch=pb.Fetch(key=KEY, handle=accepted.handle, ticket=accepted.ticket))
            done = await prefill.until("done")
            assert (await decode.until("fetched")).num_tokens == len(PROMPT)
            decode.dispatch(start=pb.Start(key=KEY, first_tokens=done.first_tokens))
            assert (await decode.until("ended")).code == 0
            assert (await prefill.until("ended")).code == 0
            assert not prefill.dispatcher.legs and not decode.dispatcher.legs
            assert len(prefill.ended) == len(decode.ended) == 1
            rows = [token for row in decode.outbox.runs for token in row.token_ids]
            return [done.first_tokens[0].token_id, *rows]

    engine = bare_engine.load_engine(model, num_blocks=64, threads=1)
    request = Request(Key("bare"), tuple(PROMPT), len(PROMPT), SamplingParams(), 9)
    assert run_bounded(main) == bare_engine.serve_alone(engine, [request])["bare"][0].token_ids


def test_a_half_leaves_the_other_roles_commands_alone(model):
    async def main():
        async with Half(model, prefill_worker.states.TRANSITIONS) as half:
            half.dispatch(admit=pb.Admit(key=KEY, spec=make_spec(PROMPT)))
            assert not half.outbox.events and not half.dispatcher.legs

    run_bounded(main)


def test_the_step_of_checkpoints_that_is_told_is_one_of_whole_blocks(tmp_path):
    make_folder(tmp_path, "mamba2", num_hidden_layers=1)
    shutil.copy(make_model(tmp_path / "other") / "tokenizer.json", tmp_path)
    half = Half(tmp_path, prefill_worker.states.TRANSITIONS, block_size=128, checkpoint_tokens=192)
    half.memory.close()
    assert half.hello().checkpoint_tokens == 256


def test_a_worker_whose_states_are_on_a_gpu_serves_alone_and_says_so(tmp_path, monkeypatch, caplog):
    make_folder(tmp_path, "mamba2", num_hidden_layers=1)
    shutil.copy(make_model(tmp_path / "other") / "tokenizer.json", tmp_path)
    half = Half(tmp_path, prefill_worker.states.TRANSITIONS)
    try:
        assert half.transfer.gives and half.transfer.takes and "states on a GPU" not in caplog.text
        monkeypatch.setattr(half.engine.pool, "device", torch.device("cuda", 0))
        alone = KVEndpoints(half.engine, half.memory, half.identity, half.settings, Guard(is_open=True))
        assert not alone.gives and not alone.takes and "states on a GPU do not cross" in caplog.text
    finally:
        half.memory.close()
