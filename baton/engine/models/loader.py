"""From a Hugging Face folder to a Model: weights are mapped, each tensor is read once."""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.attention.base import AttentionShape
from baton.engine.attention.choice import choose as choose_attention
from baton.engine.kv.pool import DTYPES
from baton.engine.layers.linear import choose as choose_linear
from baton.engine.layers.rope import Rope
from baton.engine.models.llama import Model
from baton.engine.models.spec import ModelError, ModelSpec, read_json
from kvtransfer.naming import ModelIdentity
from kvtransfer.naming import model_identity as identity_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def load_model(
    path: str | Path,
    dtype: str = "auto",
    attention: str = "auto",
    linear: str = "auto",
    batch_invariant: bool = True,
    max_model_len: int | None = None,
) -> Model:
    """Read a model. `dtype`: auto (the checkpoint's), bf16, fp16 or fp32; `max_model_len` None: the model's context.

    Raises ModelError naming the file that is at fault, ValueError for a backend that may not be used.
    """
    spec = ModelSpec.from_folder(path)
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype {dtype!r}: one of auto, {', '.join(DTYPES)}")
    compute = DTYPES[spec.dtype if dtype == "auto" else dtype]
    make_linear, linear_reasons = choose_linear(linear, batch_invariant)
    shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.windows, compute)
    backend, attention_reasons = choose_attention(attention, shape, batch_invariant)
    try:
        rope = Rope(spec.rope, spec.head_dim, max_model_len or spec.context)
    except ValueError as error:
        raise ModelError(f"{spec.folder / 'config.json'}: {error}") from None
    weights = Weights(spec.folder)
    model = Model(spec, compute, lambda name, *size: weights.read(name, size).to(compute), make_linear, backend, rope)
    model.reasons = {"attention": attention_reasons, "linear": linear_reasons}
    return model


def model_identity(path: str | Path) -> ModelIdentity:
    """Digest of config.json, of every byte of the weights, and of tokenizer.json where there is one."""
    folder = Path(path)
    manifest = "".join(f"{file.name} {_sha256(file)}\n" for file in weight_files(folder))
    tokenizer = folder / "tokenizer.json"
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{config}: no such file")
    return identity_of(config.read_bytes(), manifest.encode(), tokenizer.read_bytes() if tokenizer.is_file() else b"")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in order of name."""
    if (folder / INDEX).exists():
        return sorted(folder / name for name in set(_weight_map(folder).values()))
    return [folder / SINGLE]


class Weights:
    """Tensors of a model folder by name, mapped from one file or from several."""

    def __init__(self, folder: Path):
        self._source = folder / (INDEX if (folder / INDEX).exists() else SINGLE)
        self._files: dict[str, tuple[Path, object]] = {}
        for path in weight_files(folder):
            file = _open(path)
            self._files.update(dict.fromkeys(file.keys(), (path, file)))

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this shape, as stored. Raises ModelError where it is missing or shaped otherwise."""
        if name not in self._files:
            raise ModelError(f"{self._source}: tensor {name} is missing")
        path, file = self._files[name]
        found = tuple(file.get_slice(name).get_shape())
        if found != shape:
            raise ModelError(f"{path}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}")
        tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelError(f"{path}: tensor {name} is {tensor.dtype}, a weight format that is not supported")
        return tensor


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ModelError(f"{path}: weight_map is missing or empty")
    for name in files.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{path}: weight_map names {name!r}, not a file of this folder")
    return files


def _open(path: Path):
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: truncated or not a safetensors file ({error})") from None


def _sha256(path: Path) -> str:
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
