"""What a step of a mixture of experts is counted to read."""

from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.step_work import WorkRates
from baton.worker.observe.roofline import Cost
from tests.support.model_folders.families import make_folder


def load(folder, name):
    make_folder(folder, name, hidden_size=64)
    return Engine.load(EngineConfig(folder, num_blocks=16, max_num_seqs=2, threads=1))


def test_a_step_reads_the_chosen_experts_and_at_most_all(tmp_path):
    engine = load(tmp_path, "mixtral")  # 2 of 5 experts
    cost, whole = Cost(engine), engine.runner.model.weights.num_bytes
    one, two, many = (cost.bytes_per_s(WorkRates(steps=1, tokens=count)) for count in (1, 2, 64))
    assert many == whole and one < two < many
    expert = (many - one) / 3
    assert abs((two - one) - 2 * expert) < 1e-6 * whole


def test_a_dense_model_is_read_whole(tmp_path):
    engine = load(tmp_path, "gemma2")
    assert Cost(engine).bytes_per_s(WorkRates(steps=1, tokens=1)) == engine.runner.model.weights.num_bytes
