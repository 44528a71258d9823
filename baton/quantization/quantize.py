"""Turn a float model folder into a quantized one, layer by layer: read, calibrate, round, write, drop.

In memory are one layer in fp32, the second moments of one stage's inputs, the calibration set's activations at that
layer (num_tokens x (2 x hidden_size + 2 x intermediate_size) fp32 at most), and a shard of the output."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from baton.engine.core.model_errors import read_json
from baton.engine.core.model_spec import ModelSpec
from baton.engine.kv.pool import DTYPES
from baton.engine.layers.rope import Rope
from baton.engine.models.loader import Weights
from baton.engine.models.registry import read_spec
from baton.engine.weights.formats.base import EMBED, HEAD
from baton.engine.weights.formats.registry import quantization_config
from baton.engine.weights.formats.rounded import GROUPS
from baton.quantization.core import linears
from baton.quantization.core.block import STAGES, Block, LayerWeights, Stage, linear_shapes, unfit
from baton.quantization.core.errors import QuantizeError
from baton.quantization.core.progress import bar_disabled
from baton.quantization.folder import FolderWriter, new_folder
from baton.quantization.schemes import SCHEMES, Form, Scheme, Settings
from baton.quantization.stored import config_of, tensors_of

_EMBEDDING, _FINAL_NORM, _HEAD = f"{EMBED}.weight", "model.norm.weight", f"{HEAD}.weight"


@dataclass(frozen=True)
class QuantizeJob:
    """A model, a scheme and a group size that fit each other."""

    spec: ModelSpec
    scheme: Scheme
    settings: Settings

    @property
    def packed(self) -> bool:
        """Whether weight-only integers are stored in int32 words."""
        return self.scheme.grouped or self.scheme.name == "int8-weight-only"


def plan(model: Path, scheme: str, group: int | None = None) -> QuantizeJob:
    """Return a job with everything checked that can be before weights are read. Raises QuantizeError, ModelError."""
    if scheme not in SCHEMES:
        raise QuantizeError(f"scheme {scheme!r}: one of {', '.join(SCHEMES)}")
    if not model.is_dir():
        raise QuantizeError(f"{model}: no such model folder (a folder with config.json and safetensors is needed)")
    spec = read_spec(model)
    if (reason := unfit(spec)) and SCHEMES[scheme].calibrated:
        plain = ", ".join(name for name, known in SCHEMES.items() if not known.calibrated)
        raise QuantizeError(
            f"{model}: scheme {scheme} is calibrated through Llama's layers, not {reason}; take {plain}"
        )
    if any(layer.experts and layer.experts.stacked for layer in spec.layers):
        raise QuantizeError(f"{model}: experts in one tensor are not quantized; serve it with --quantization")
    if (found := quantization_config(model)) is not None:
        method = found.get("quant_method", "unknown")
        raise QuantizeError(f"{model}: already quantized ({method}); give the float model")
    return QuantizeJob(spec, SCHEMES[scheme], Settings(_group(spec, SCHEMES[scheme], group), DTYPES[spec.dtype]))


def quantize(job: QuantizeJob, out: Path, samples: list[Tensor] | None = None, progress: bool = False) -> None:
    """Write the quantized folder. `samples`: token ids of the calibration set, int64 [tokens] each, needed if
    job.scheme.calibrated.

    `out` appears complete or not at all. Raises QuantizeError if it exists, ModelError for a broken model."""
    with new_folder(out) as writer, torch.inference_mode():
        weights = _open(job.spec)
        if unfit(job.spec):
            _round_as_stored(job, weights, writer, progress)
            return
        embedding = weights.read(_EMBEDDING, (job.spec.vocab_size, job.spec.hidden_size))
        activations = [F.embedding(sample, embedding).float() for sample in samples or ()]
        longest = max((len(sample) for sample in samples or ()), default=1)
        rope, config = Rope(job.spec.ropes[0], job.spec.head_dim, longest), None
        for index in tqdm(range(job.spec.num_layers), job.scheme.name, unit="layer", disable=bar_disabled(progress)):
            form, activations = _quantize_layer(job, index, weights, rope, activations, writer)
            config = config or config_of(job.scheme.name, form, job.packed, job.settings.group)
        writer.add({_EMBEDDING: embedding, _FINAL_NORM: weights.read(_FINAL_NORM, (job.spec.hidden_size,))})
        if not job.spec.tied or _HEAD in weights:
            writer.add({_HEAD: weights.read(_HEAD, (job.spec.vocab_size, job.spec.hidden_size))})
        writer.finish(job.spec.folder, read_json(job.spec.folder / "config.json") | {"quantization_config": config})


def _open(spec: ModelSpec) -> Weights:
    """Return the tensors by the names that the engine uses, including those of a layer that predicts further tokens."""
    around = () if spec.predictor is None else spec.predictor.renamed
    return Weights(spec.folder, (*around, *spec.names.renamed))


def _round_as_stored(job: QuantizeJob, weights: Weights, writer: FolderWriter, progress: bool) -> None:
    """Round every linear of the layers, one tensor at a time, and copy the rest; no layer is computed."""
    spec, config, rounded, kept = job.spec, None, set[str](), list[str]()
    for index in tqdm(range(spec.num_layers), job.scheme.name, unit="layer", disable=bar_disabled(progress)):
        for module, shape in linears.linear_shapes(spec, weights, index).items():
            weight, stored = weights.read(f"{module}.weight", shape).float(), weights.stored_name(f"{module}.weight")
            form = job.scheme.round(LayerWeights({module: weight}), Stage((module,), []), job.settings)[module]
            writer.add(tensors_of(stored.removesuffix(".weight"), form, job.settings.dtype, job.packed))
            config = config or config_of(job.scheme.name, form, job.packed, job.settings.group)
            rounded.add(f"{module}.weight")
    for name in weights.names():
        if name not in rounded:
            tensor, stored = weights.read(name), weights.stored_name(name)
            writer.add({stored: tensor})
            if tensor.dim() == 2 and name.endswith(".weight") and name not in (_EMBEDDING, _HEAD):
                # Readers of the folder may take these for linears, under our names too.
                kept += [each.removesuffix(".weight") for each in dict.fromkeys((name, stored))]
    assert config is not None, "a model has layers"
    quantization = config | {"ignore": [*config["ignore"], *kept]}
    writer.finish(spec.folder, read_json(spec.folder / "config.json") | {"quantization_config": quantization})


def _quantize_layer(
    job: QuantizeJob, index: int, weights: Weights, rope: Rope, activations: list[Tensor], writer: FolderWriter
) -> tuple[Form, list[Tensor]]:
    """Round and write one layer; return the form of one of its linears, and the rounded layer's outputs for the
    calibration set."""
    block = Block(job.spec, index, weights.read, rope)
    forms: dict[str, Form] = {}

    def round_stage(stage: Stage) -> None:
        made = job.scheme.round(block, stage, job.settings)
        forms.update(made)
        block.weights.update((name, form.dequantize()) for name, form in made.items())

    if (fold := job.scheme.fold) is not None:
        block.run(activations, lambda stage: fold(block, stage, job.settings))
    if job.scheme.calibrated:
        activations = block.run(activations, round_stage)
    else:
        for names in STAGES:
            round_stage(Stage(names, []))
    _write(job, block, forms, writer)
    return forms[STAGES[0][0]], activations


def _write(job: QuantizeJob, block: Block, forms: dict[str, Form], writer: FolderWriter) -> None:
    prefix, dtype = f"model.layers.{block.index}.", job.settings.dtype
    for name, form in forms.items():
        writer.add(tensors_of(prefix + name, form, dtype, job.packed))
    writer.add({f"{prefix}{name}.bias": bias.to(dtype) for name, bias in block.biases.items()})
    writer.add({f"{prefix}{name}.weight": norm.to(dtype) for name, norm in block.norms.items()})


def _group(spec: ModelSpec, scheme: Scheme, group: int | None) -> int | None:
    """Return the requested group size, or for int4 the largest that divides every linear."""
    widths = _widths(spec) if scheme.grouped or group is not None else []
    if group is None:
        if not scheme.grouped:
            return None
        fitting = [size for size in GROUPS if not any(width % size for width in widths)]
        if not fitting:
            raise QuantizeError(f"no group of {_listed(GROUPS)} divides the model's {_listed(widths)} inputs; use int8")
        return fitting[-1]
    if not scheme.grouped and scheme.name != "int8-weight-only":
        raise QuantizeError(f"scheme {scheme.name} has one scale a row; leave --group away")
    if group not in GROUPS:
        raise QuantizeError(f"group {group}: one of {_listed(GROUPS)}")
    if wrong := [width for width in widths if width % group]:
        raise QuantizeError(f"group {group} does not divide the {_listed(wrong)} inputs of a layer; take a smaller one")
    return group


def _widths(spec: ModelSpec) -> list[int]:
    """Return the input widths of the layers' linears."""
    if not unfit(spec):
        return sorted({width for _, width in linear_shapes(spec).values()})
    weights = _open(spec)
    layers = (linears.linear_shapes(spec, weights, index).values() for index in range(spec.num_layers))
    return sorted({width for shapes in layers for _, width in shapes})


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
