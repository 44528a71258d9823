"""Load a Model from a Hugging Face folder or a .gguf file. Weights are mapped, and each tensor is read once."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton import system
from baton.engine import kernels
from baton.engine.attention.base import AttentionShape
from baton.engine.attention.selection import choose as choose_attention
from baton.engine.core.config import EngineConfig, resolve_dtypes
from baton.engine.core.device import Memory, check_weights, memory_share
from baton.engine.core.model_errors import ModelError
from baton.engine.core.model_spec import PREDICTOR, WRONG_VALUE, ModelSpec
from baton.engine.kv.pool import CPU, DTYPES
from baton.engine.layers.linear import LinearKernel
from baton.engine.layers.linear import choose as choose_linear
from baton.engine.layers.norm import Norm
from baton.engine.layers.rope import Rope
from baton.engine.models.decoder import Model
from baton.engine.models.leading import (
    FirstDeviceStage,
    FirstStage,
    FirstStageOfRanks,
    LeadingDeviceModel,
    LeadingModel,
    NextDeviceStage,
)
from baton.engine.models.linears import Linears
from baton.engine.models.read_layer import read_norm
from baton.engine.models.registry import read_spec
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.distributed import StageCollectives
from baton.engine.parallel.pipeline import PipelineLeader
from baton.engine.parallel.shard import WHOLE, Shard, unfit_for_ranks
from baton.engine.parallel.stage import PipelineStage
from baton.engine.weights.formats.base import DenseFormat
from baton.engine.weights.formats.placed import PlacedSource
from baton.engine.weights.formats.registry import open_source
from baton.engine.weights.forms import Weight
from baton.engine.weights.tensors import Weights, weight_files
from baton.gguf import is_gguf
from baton.model_files import why_not_itself
from kvtransfer.naming import ModelIdentity
from kvtransfer.naming import model_identity as identity_of

__all__ = ["PredictorModules", "Weights", "load_model", "load_predictor", "model_identity", "weight_files"]


@dataclass(frozen=True, slots=True)
class PredictorModules:
    """Hold a layer that a checkpoint ships to predict further tokens, and the parts around it."""

    project: LinearKernel
    embedding_norm: Norm
    features_norm: Norm
    norm: Norm
    layer: Model  # holds only this layer


def load_model(
    config: EngineConfig,
    device: torch.device = CPU,
    collectives: Collectives | None = None,
    stage: PipelineStage | None = None,
    pipeline: PipelineLeader | None = None,
    stages: StageCollectives | None = None,
) -> Model:
    """Read the model that `config` names onto `device`, for KV in its blocks and stored form. With `collectives` only
    this rank's part is read, with `stage` only its layers. `pipeline`: the first stage's link to the others; `stages`:
    used if each stage has a device.

    Raises ModelError naming the file at fault, and ValueError for a backend that may not be used or weights that do not
    fit in the GPU's memory.
    """
    spec = read_spec(config.model)
    if spec.state is not None and device != CPU and (why := kernels.unavailable(device.type)):
        raise ModelError(f"{spec.folder}: layers with a state on a GPU: {why}")
    config = resolve_dtypes(config, spec)
    compute = DTYPES[config.dtype]
    make_linear, linear_reasons = choose_linear(config.linear, config.batch_invariant, compute, device)
    shard = WHOLE if collectives is None else collectives.shard
    if why := unfit_for_ranks(spec, shard) if shard.degree > 1 else "":
        raise ModelError(f"tensor_parallel {shard.degree}: {spec.folder}: {why}")
    attended = shard if spec.kv_layers else WHOLE
    shape = _attention_shape(spec, attended, compute, device, config.kv_dtype, config.block_size)
    backend, attention_reasons = choose_attention(config.attention, shape, config.batch_invariant)
    ropes = _read_ropes(spec, config)
    source = open_source(
        spec.folder, config.quantization, compute, spec.num_heads, spec.num_kv_heads, spec.names.renamed
    )
    if device != CPU:
        quantization = "none" if source.name == DenseFormat.name else config.quantization
        num_bytes = _least_bytes(spec, shard, stage, None if quantization == "auto" else compute, source.file_bytes)
        check_weights(num_bytes, Memory.of(device), memory_share(config), quantization)
        source, ropes = PlacedSource(source, device), [rope.to(device) for rope in ropes]

    def make(weight: Weight, bias: Tensor | None, leaves: int, partial: bool, num_outputs: int = 0) -> LinearKernel:
        system.trim_heap()  # after each weight: reading and packing left 81 MiB of a 121 MiB file in malloc's heap
        return make_linear(weight, bias, leaves, partial, num_outputs)

    # Ranks have to choose the same experts, so their kernel must be the same on all, not the one that each measured as
    # fastest on its GPU.
    agree = collectives is not None and not kernels.unavailable(device.type)
    make_router, _ = choose_linear("auto", config.batch_invariant or agree, torch.float32, device)
    arguments = spec, compute, source, make, backend, ropes, make_router, collectives, config.may_adapt, stage
    model = _model_class(collectives, stage, stages, pipeline)(*arguments)
    model.reasons |= {"attention": attention_reasons, "linear": linear_reasons}
    system.trim_heap()
    return model


def load_predictor(model: Model, config: EngineConfig, block_size: int) -> PredictorModules:
    """Read the predictor layer that `model` ships, for KV in blocks of `block_size`. Raises ModelError if a tensor is
    missing or does not fit."""
    spec, index, predictor = model.spec, model.spec.num_layers, model.spec.predictor
    assert predictor is not None
    # The other layers keep nothing, so that the KV is that of a model with one layer.
    others = tuple(replace(layer, has_attention=False, state=None) for layer in spec.layers)
    own = replace(spec, layers=(*others, predictor.layer))
    names = (*predictor.renamed, *spec.names.renamed)
    source = open_source(spec.folder, config.quantization, model.dtype, spec.num_heads, spec.num_kv_heads, names)
    if model.device != CPU:
        source = PlacedSource(source, model.device)
    make, _ = choose_linear(config.linear, config.batch_invariant, model.dtype, model.device)
    make_router, _ = choose_linear("auto", config.batch_invariant, torch.float32, model.device)
    shape = _attention_shape(own, WHOLE, model.dtype, model.device, config.dtype, block_size)
    attention, _ = choose_attention(config.attention, shape, config.batch_invariant)
    size = spec.hidden_size
    project = Linears(source, make).read([f"{PREDICTOR}.project"], [size], 2 * size, False)
    embedding_norm, features_norm, norm = (
        read_norm(spec.norm, source, f"{PREDICTOR}.{name}", size)
        for name in ("embedding_norm", "features_norm", "norm")
    )
    stage = PipelineStage(1, range(index, index + 1))
    layer = Model(own, model.dtype, source, make, attention, model.ropes, make_router, stage=stage)
    return PredictorModules(project, embedding_norm, features_norm, norm, layer)


def model_identity(path: str | Path) -> ModelIdentity:
    """Return the digests of config.json, of every byte of the weights, and of tokenizer.json if it exists; a .gguf file
    is all three. Raises ModelError if config.json is missing."""
    folder = Path(path)
    if is_gguf(folder):
        return identity_of(b"gguf", _sha256(folder).encode(), b"")
    manifest = "".join(f"{file.name} {_sha256(file)}\n" for file in weight_files(folder))
    tokenizer = folder / "tokenizer.json"
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{config}: {why_not_itself(config) or 'no such file'}")
    return identity_of(config.read_bytes(), manifest.encode(), tokenizer.read_bytes() if tokenizer.is_file() else b"")


def _least_bytes(
    spec: ModelSpec, shard: Shard, stage: PipelineStage | None, dtype: torch.dtype | None, file_bytes: int
) -> int:
    """Return what the weights of one process on a GPU take at least: floats in `dtype`, before any are rounded; None:
    as they are stored in quantized files of `file_bytes`, which have embedding and head in 16 bits. A rank has its part
    of the layers and of the head, and the whole embedding."""
    own = spec if stage is None else replace(spec, layers=tuple(spec.layers[index] for index in stage.layers))
    table = spec.vocab_size * spec.hidden_size
    head = 0 if spec.tied else table
    ends = table + head // shard.degree if stage is None or stage.index == 0 else 0
    if dtype is not None:
        return (own.num_layer_weights() // shard.degree + ends) * dtype.itemsize
    of_layers = max(0, file_bytes - 2 * (table + head)) * own.num_layer_weights() // spec.num_layer_weights()
    return of_layers // shard.degree + 2 * ends


def _attention_shape(
    spec: ModelSpec, shard: Shard, compute: torch.dtype, device: torch.device, kv_form: str, block_size: int
) -> AttentionShape:
    """Return the attention shape of a rank's part of a model."""
    return AttentionShape(
        num_heads=len(shard.range_of(spec.num_heads)),
        num_kv_heads=len(shard.kv_heads(spec.num_kv_heads)),
        head_dim=spec.head_dim,
        windows=spec.windows,
        dtype=compute,
        device=device,
        kv_form=kv_form,
        block_size=block_size,
        given_scale=spec.attention_scale,
        softcap=spec.attention_softcap,
        sinks=spec.sinks,
        chunked=spec.chunked,
    )


def _read_ropes(spec: ModelSpec, config: EngineConfig) -> list[Rope]:
    """Return the ropes of a model, on the CPU. Raises ModelError for wrong values."""
    try:
        return [Rope(rope, spec.head_dim, config.max_model_len or spec.context) for rope in spec.ropes]
    except WRONG_VALUE as error:
        named = spec.folder if is_gguf(spec.folder) else spec.folder / "config.json"
        raise ModelError(f"{named}: {error}") from None


def _model_class(
    collectives: Collectives | None,
    stage: PipelineStage | None,
    stages: StageCollectives | None,
    pipeline: PipelineLeader | None,
) -> Callable[..., Model]:
    """Return the constructor of this process's model, with the arguments of Model: whole, of a rank, or of a stage."""
    if stages is not None:
        assert stage is not None
        return partial(NextDeviceStage if stage.index else FirstDeviceStage, stages)
    if pipeline is not None:
        return partial(FirstStage if collectives is None else FirstStageOfRanks, pipeline)
    if collectives is None or collectives.shard.rank != 0 or stage is not None:
        return Model
    return LeadingModel if collectives.shares_memory else LeadingDeviceModel


def _sha256(path: Path) -> str:
    if not path.is_file():
        raise ModelError(f"{path}: {why_not_itself(path) or 'no such file'}")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
