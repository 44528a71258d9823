"""Recognize the format of a model by its file type or by the quantization_config of its config.json."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from baton.engine.core.model_errors import ModelError, read_json
from baton.engine.weights.formats.awq import AWQFormat
from baton.engine.weights.formats.base import WRONG_CONFIG, DenseFormat, Format, WeightSource, why_wrong
from baton.engine.weights.formats.bitsandbytes import BitsAndBytesFormat
from baton.engine.weights.formats.compressed import CompressedTensorsFormat
from baton.engine.weights.formats.fp8 import FP8Format
from baton.engine.weights.formats.gptq import GPTQFormat
from baton.engine.weights.formats.mxfp4 import Mxfp4Format
from baton.engine.weights.formats.outlier import OutlierFormat
from baton.engine.weights.formats.rounded import ROUNDINGS, RoundedFormat
from baton.engine.weights.tensors import Weights
from baton.gguf import is_gguf

FORMATS: dict[str, type[Format]] = {
    format.name: format
    for format in (
        GPTQFormat, AWQFormat, FP8Format, CompressedTensorsFormat, BitsAndBytesFormat, OutlierFormat, Mxfp4Format,
    )
}  # fmt: skip
AUTO, NONE = "auto", "none"
CHOICES = (AUTO, NONE, *ROUNDINGS)
OLD_CONFIG = "quantize_config.json"  # written by AutoGPTQ beside config.json, before transformers supported it


def open_source(
    path: Path,
    quantization: str,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    renamed: Sequence[tuple[str, str]] = (),
) -> WeightSource:
    """Return the weights of a folder or a .gguf file. `quantization`: "auto" takes them as they are; "none" accepts
    only unquantized ones; a key of ROUNDINGS rounds an unquantized folder. `renamed`: as for Weights. Raises
    ModelError, and ValueError for an option that does not fit the model."""
    if quantization not in CHOICES:
        raise ValueError(f"quantization {quantization!r}: one of {', '.join(CHOICES)}")
    if is_gguf(path):
        if quantization != AUTO:
            raise ValueError(f"quantization {quantization}: {path} is a GGUF file and has its own; leave it at auto")
        # Imported late: the gguf package would add a tenth of a second to every other start.
        from baton.engine.core.gguf_file import GGUFFile
        from baton.engine.weights.formats.gguf import GGUFFormat

        return GGUFFormat(GGUFFile(path), dtype, num_heads, num_kv_heads)
    config = quantization_config(path)
    if config is None:
        weights = Weights(path, renamed)
        if quantization in ROUNDINGS:
            return RoundedFormat(weights, dtype, quantization)
        return DenseFormat(weights, dtype)
    method = str(config.get("quant_method") or "").lower()
    if method not in FORMATS:
        kind = f" ({algorithm})" if (algorithm := config.get("quant_algo")) else ""
        raise ModelError(
            f"{path / 'config.json'}: quantization method {method or '(none given)'}{kind} is not supported, "
            f"one of {', '.join(FORMATS)}, or a .gguf file"
        )
    if quantization != AUTO:
        raise ValueError(f"quantization {quantization}: {path} is already quantized ({method}); leave it at auto")
    try:
        return FORMATS[method](Weights(path, renamed), config, dtype)
    except WRONG_CONFIG as error:
        raise ModelError(f"{path / 'config.json'}: quantization_config: {why_wrong(error)}") from None


def quantization_config(folder: Path) -> dict | None:
    """Return the folder's quantization_config; None without one. Raises ModelError if it is not an object."""
    path = folder / "config.json"
    found = read_json(path)
    config = found.get("quantization_config") or found.get("compression_config")
    if config is None and os.path.lexists(folder / OLD_CONFIG):
        config = {"quant_method": "gptq"} | read_json(folder / OLD_CONFIG)
    if config is not None and not isinstance(config, dict):
        raise ModelError(f"{path}: quantization_config is not an object")
    return config
