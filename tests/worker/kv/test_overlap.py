"""KV leaves while the prompt is still read: by chunks, by layers within the last one, and the cached prefix at once."""

import time

import pytest

from baton.engine.execute import watermark
from baton.engine.execute.runner import Runner
from tests.support.bare_engine import answer_alone
from tests.support.models import make_model
from tests.support.worker.scripted import Pair, Session, make_spec, run_bounded, run_pair, run_worker, worker_prompt

CHUNK_S = 0.2  # a chunk of a model that is worth splitting takes long; a busy machine needs the time to move the last
LAYER_S = 0.1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def slow_chunks(monkeypatch):
    compute = Runner.run

    def slow(self, *args, **kwargs):
        time.sleep(CHUNK_S)
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(Runner, "run", slow)


@pytest.fixture
def slow_layers(monkeypatch):
    written = watermark.LayerWatermark.__call__

    def slow(self, layer):
        written(self, layer)
        time.sleep(LAYER_S)

    monkeypatch.setattr(watermark.LayerWatermark, "__call__", slow)
    monkeypatch.setattr(watermark, "MIN_INTERVAL_S", 0.0)  # its first layer takes less
    monkeypatch.setattr(watermark, "MIN_BYTES", 0)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_all_but_the_last_chunk_has_left(model, transport, slow_chunks):
    async def main():
        options = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "transports": (transport,)}
        async with run_pair(model, **options) as (pair, _, _):
            answer = await pair.generate("one", make_spec(worker_prompt(600), max_tokens=3))
            fetched = answer.fetched
            last_chunk = fetched.num_bytes * (600 % 128) / 600
            assert 0 < fetched.num_bytes - fetched.num_bytes_early <= last_chunk
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()
            return answer.token_ids

    assert run_bounded(main) == answer_alone(model, worker_prompt(600), 3)


def test_one_chunk_leaves_by_layers(model, slow_layers):
    async def main():
        async with run_pair(model) as (pair, prefill, _):
            answer = await pair.generate("one", make_spec(worker_prompt(200), max_tokens=3))
            num_layers = prefill.engine.layout.num_layers
            fetched = answer.fetched
            assert fetched.num_bytes_early >= fetched.num_bytes * (num_layers - 1) / num_layers > 0
            return answer.token_ids

    assert run_bounded(main) == answer_alone(model, worker_prompt(200), 3)


def test_the_cached_prefix_leaves_before_anything_is_computed(model, slow_chunks):
    """Its taker has none of it: what the prefill worker has in its cache need not wait for the rest."""

    async def main():
        async with run_pair(model) as (pair, _, _), run_worker(model, "decode") as other:
            await pair.generate("first", make_spec(worker_prompt(256), max_tokens=3))
            session = await Session(f"127.0.0.1:{other.port}").open()
            fresh = Pair(pair.prefill, session)
            answer = await fresh.generate("one", make_spec(worker_prompt(256) + worker_prompt(70, 2), max_tokens=3))
            assert answer.accepted.num_cached_tokens == 256 and answer.granted.num_cached_tokens == 0
            assert answer.fetched.num_bytes_early >= answer.fetched.num_bytes * 256 / 326
            await session.wait_idle()
            await session.close()

    run_bounded(main)
