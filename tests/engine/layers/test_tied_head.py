"""A head that is the embedding: one copy stays, and no bit depends on which of the two it is."""

import gc
import weakref

import pytest
import torch

from baton.engine.core.config import EngineConfig
from baton.engine.layers.embedding import Embedding, PackedEmbedding
from baton.engine.layers.linear import packed
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.models.linears import Linears
from baton.engine.models.loader import load_model
from baton.engine.models.read_layer import read_head
from baton.engine.models.registry import read_spec
from baton.engine.weights.formats.base import DenseFormat
from baton.engine.weights.formats.placed import PlacedSource
from baton.engine.weights.formats.registry import open_source
from tests.support.engine.manual_batch import ManualBatch
from tests.support.model_folders.families import make_folder, random_ids
from tests.support.model_folders.weight_forms import dense_weight

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
native = pytest.mark.skipif(bool(packed.unavailable()), reason=packed.unavailable() or "there")


@native
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(199, 48), (64, 33), (1, 7)], ids=str)
def test_panels_give_their_rows_back(shape, dtype):
    weight = dense_weight(shape, dtype)
    rows = PackedEmbedding(PackedLinear(weight, None, dtype).panels)
    ids = torch.randint(0, shape[0], (70,))
    assert torch.equal(rows(ids), weight.values[ids])
    assert torch.equal(rows(ids[:0]), weight.values[:0])


@native
@pytest.mark.parametrize("form", DTYPES)
def test_bytes_are_those_of_the_file(tmp_path, form, monkeypatch):
    tables = []

    def embedding(source, vocab_size, hidden_size):
        found = Embedding(source.tensor("model.embed_tokens.weight", vocab_size, hidden_size).clone())
        tables.append(weakref.ref(found.weight))
        return found

    monkeypatch.setattr(DenseFormat, "embedding", embedding)
    make_folder(tmp_path, "llama3.2-tied", DTYPES[form], vocab_size=4096, intermediate_size=128)
    model = load_model(EngineConfig(tmp_path))
    gc.collect()
    assert [table() for table in tables] == [None]
    assert model.weights.num_bytes <= 1.05 * model.weights.file_bytes


@native
@pytest.mark.parametrize("form", DTYPES)
def test_same_bits_as_with_a_table(tmp_path, form):
    make_folder(tmp_path, "qwen3-tied", DTYPES[form])
    model, ids = load_model(EngineConfig(tmp_path)), random_ids(40, seed=0)
    assert isinstance(model.embedding, PackedEmbedding)
    got = ManualBatch(model, form).step({"a": ids})["a"]
    table = torch.cat([model.embedding(torch.arange(begin, begin + 1)) for begin in range(model.spec.vocab_size)])
    model.embedding = Embedding(table)
    assert torch.equal(got, ManualBatch(model, form).step({"a": ids})["a"])


def test_without_packing_both_are_one_tensor(tmp_path):
    make_folder(tmp_path, "llama3.2-tied")
    model = load_model(EngineConfig(tmp_path, linear="dense"))
    assert model.embedding.weight.data_ptr() == model.head.weight.data_ptr()


@pytest.mark.parametrize("exact", [True, False])
def test_on_a_gpu_both_are_one_tensor(tmp_path, exact):
    """On meta tensors, which are moved as those of a GPU are."""
    pytest.importorskip("triton")
    from baton.engine.layers.linear.triton import GpuLinear

    make_folder(tmp_path, "llama3.2-tied", torch.bfloat16)
    spec = read_spec(tmp_path)
    read = open_source(tmp_path, "auto", torch.bfloat16, spec.num_heads, spec.num_kv_heads)
    source = PlacedSource(read, torch.device("meta"))
    linears = Linears(source, lambda weight, bias, *_: GpuLinear(weight, bias, torch.bfloat16, exact))
    embedding = source.embedding(spec.vocab_size, spec.hidden_size)
    head = read_head(spec, source, linears, embedding)
    assert head.stored.values.is_meta and head.stored.values is embedding.weight
