"""Two real workers whose pools are on one GPU, as far as they can detect: KV goes from one to the other there. The
engine computes on the CPU, in the memory of a stand-in for libcudart; what needs a real GPU is in
tests/e2e/start/test_gpu.py."""

import numpy as np
import pytest

from baton.service.settings import make_settings
from baton.worker.settings import WorkerSettings
from kvtransfer.memory.cuda_runtime import CudaRuntime, find_runtime
from tests.support.bare_engine import answer_alone
from tests.support.kvtransfer.cuda_stand_in import Cudart, Host
from tests.support.models import make_model
from tests.support.worker import scripted
from tests.support.worker.scripted import make_spec, run_bounded, run_pair, worker_prompt
from tests.support.worker.stand_in_pool import StandInPool


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def pools(monkeypatch) -> list[StandInPool]:
    """Return the pools of the workers, in the order in which they start."""
    host, made = Host(), []

    def make(mirror_gib):
        made.append(StandInPool(host, mirror_gib))
        return made[-1]

    monkeypatch.setattr(scripted, "PoolMemory", make)
    monkeypatch.setattr("baton.worker.settings.find_runtime", lambda: CudaRuntime(Cudart(host)))
    return made


@pytest.mark.parametrize("transports", [("cuda_ipc", "shm", "tcp"), ("shm",), ("tcp",)])
def test_split_equals_whole(model, pools, transports, caplog):
    caplog.set_level("INFO", "baton.worker.kv.intake")

    async def main():
        async with run_pair(model, transports=transports) as (pair, _prefill, _decode):
            assert list(pair.prefill.hello.model.transports) == list(transports)
            answer = await pair.generate("greedy", make_spec(worker_prompt(200), max_tokens=12))
            assert answer.fetched.transport == transports[0] and answer.fetched.num_tokens == 200
            spec = make_spec(worker_prompt(130, 2), max_tokens=9, temperature=1.0, seed=7, n=3)
            seeded = await pair.generate("seeded", spec)
            again = await pair.generate("again", make_spec(worker_prompt(200), max_tokens=12))
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()
            crossed = [bytes(pool.region.memory).strip(b"\0") != b"" for pool in pools]
            assert crossed == [transports[0] != "cuda_ipc"] * 2, "a mirror is touched only by those who need it"
            return answer.token_ids, seeded.token_ids, again.token_ids

    greedy, seeded, again = run_bounded(main)
    assert greedy == again == answer_alone(model, worker_prompt(200), 12)
    assert seeded == answer_alone(model, worker_prompt(130, 2), 9, temperature=1.0, seed=7, n=3)
    (told,) = [record.getMessage() for record in caplog.records if "KV is pulled by" in record.getMessage()]
    assert f"by {transports[0]} (" in told and " source=" in told, "once, with the reason"
    for pool in pools:
        assert not (pool.library.allocations or pool.library.opened or pool.library.streams), "all was given back"


@pytest.mark.skipif(find_runtime() is not None, reason="this machine has a GPU")
def test_without_a_gpu_it_cannot_be_asked_for(model):
    with pytest.raises(ValueError, match="--transports cuda_ipc: KV is on no GPU here; leave it at auto"):
        make_settings(WorkerSettings, {"model": model, "transports": ("cuda_ipc", "shm")})


@pytest.mark.parametrize("transports", [("shm",), ("tcp",)])
def test_a_mirror_that_is_bounded_holds_less_than_what_crossed(model, pools, transports):
    """Each of six prompts crosses, and the pages of the first ones are given back for the last."""
    bound = 20 * 4096 / 2**30  # 20 blocks of 160; a prompt has 13

    async def main():
        async with run_pair(model, transports=transports, kv_mirror_gib=bound, block_size=16) as (pair, _, _):
            answers = []
            for index in range(6):
                answer = await pair.generate(f"r{index}", make_spec(worker_prompt(200, index), max_tokens=4))
                assert answer.fetched.transport == transports[0]
                answers.append(answer.token_ids)
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()
            for pool in pools:
                taken = np.frombuffer(pool.region.memory, np.uint8).reshape(160, -1).any(axis=1).sum()
                assert taken == pool.room.num_resident == 20 and pool.num_mirror_bytes == 20 * 4096
            return answers

    assert run_bounded(main) == [answer_alone(model, worker_prompt(200, index), 4) for index in range(6)]


def test_other_block_sizes_meet_in_host_memory(model, pools):
    async def main():
        sizes = {"block_size": 16, "num_blocks": 320}, {"block_size": 64, "num_blocks": 80}
        async with run_pair(model, *sizes, transports=("cuda_ipc", "shm")) as (pair, _, _):
            answer = await pair.generate("one", make_spec(worker_prompt(300), max_tokens=9))
            assert answer.fetched.transport == "shm" and answer.fetched.numerics == "exact"
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()
            return answer.token_ids

    assert run_bounded(main) == answer_alone(model, worker_prompt(300), 9)
