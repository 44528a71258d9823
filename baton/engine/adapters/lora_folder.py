"""Read an adapter's folder as PEFT writes it, adapter_config.json and adapter_model.safetensors: pairs of low-rank
matrices by module. What cannot be added row by row is refused in one line."""

import hashlib
import json
import math
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from baton.engine.core.model_errors import ModelError, read_json
from baton.engine.weights.tensors import FLOATS
from baton.model_files import why_not_itself

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 256
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Prefixes in place of `model.` if the text model is within another, in transformers now and before 4.52.
_AROUND = ("model.language_model.", "language_model.model.")
# Settings of methods other than plain LoRA on linear layers, and the values that turn them off.
_PLAIN = {
    "use_dora": (False,), "bias": ("none",), "lora_bias": (False,), "fan_in_fan_out": (False,), "modules_to_save": ([],),
    "layer_replication": ([],), "trainable_token_indices": ([], {}), "target_parameters": ([],),
    "alora_invocation_tokens": ([],), "use_qalora": (False,), "use_bdlora": (False, {}), "arrow_config": (), "kasa_config": (),
}  # fmt: skip
# Initializations of PEFT that leave the base as it is. Others (pissa, olora, corda, loftq, lora_ga) change the base's
# weights, so the adapter belongs to another base than the one that is served.
_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


class LoraFolder:
    """Hold the pairs of one adapter, whole in memory, so that the folder may change or vanish."""

    def __init__(self, folder: Path, files: tuple[bytes, bytes] | None = None):
        """Read a folder, or `files` as the property of another process returned them. Raises ModelError if the folder
        cannot be read or is not plain LoRA."""
        self.folder = folder
        self._config = read_json(folder / CONFIG) if files is None else json.loads(files[0])
        self._check_config()
        config, weights = files or (self._bytes(CONFIG), self._bytes(WEIGHTS))
        self.identity = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in (config, weights))).digest()
        self._pairs: dict[str, dict[str, Tensor]] = {}
        self._read_tensors(weights)
        self._left = dict.fromkeys(self._pairs)

    @property
    def files(self) -> tuple[bytes, bytes]:
        """Return config and weights for another process, which makes the same pairs of them."""
        tensors = {
            f"base_model.model.{module}.lora_{part}.weight": tensor
            for module, pair in self._pairs.items()
            for part, tensor in pair.items()
        }
        return json.dumps(self._config).encode(), save(tensors)

    def pair(self, module: str, out_features: int, in_features: int) -> tuple[Tensor, Tensor] | None:
        """Return A [rank, in_features] and B [out_features, rank], fp32, B with the adapter's scale; None if the
        adapter does not change the module. Raises ModelError if the shapes are those of another base."""
        names = (module, *(around + module.removeprefix("model.") for around in _AROUND))
        if (name := next(filter(self._pairs.__contains__, names), None)) is None:
            return None
        self._left.pop(name, None)
        pair, rank = self._pairs[name], self._rank(name)
        for part, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
            if tuple(pair[part].shape) != shape:
                reason = f"has shape {list(pair[part].shape)}, this base and rank {rank} ask for {list(shape)}"
                raise self._wrong(f"{name}.lora_{part}", reason)
        return pair["A"].float(), pair["B"].float() * self._scale(name, rank)

    def check_all_read(self) -> None:
        """Raise ModelError if the adapter has a module that the base cannot take; then allow all to be read again."""
        left, self._left = self._left, dict.fromkeys(self._pairs)
        if left:
            raise self._wrong(next(iter(left)), "is no linear layer of this base that adapters are served for")

    def _check_config(self) -> None:
        config, path = self._config, self.folder / CONFIG
        if (kind := config.get("peft_type")) != "LORA":
            raise ModelError(f"{path}: peft_type {kind!r}: only LORA is served")
        for key, plain in _PLAIN.items():
            if (value := config.get(key)) is not None and value not in plain:
                raise ModelError(f"{path}: {key} {value!r}: only plain LoRA on linear layers is served")
        if (begun := config.get("init_lora_weights")) not in _BEGINNINGS:
            reason = "changes the base's weights; save the adapter with path_initial_model_for_weight_conversion"
            raise ModelError(f"{path}: init_lora_weights {begun!r} {reason}")
        if not isinstance(scales_by_root := config.get("use_rslora"), bool | None):
            raise ModelError(f"{path}: use_rslora is {scales_by_root!r:.40}: true or false is needed")
        numbers = {"r": config.get("r"), "lora_alpha": config.get("lora_alpha")}
        for key in ("rank_pattern", "alpha_pattern"):
            patterns = config.get(key) or {}
            if not isinstance(patterns, dict):
                raise ModelError(f"{path}: {key} {patterns!r}: is no object")
            numbers |= {f"{key} of {name}": value for name, value in patterns.items()}
        for key, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ModelError(f"{path}: {key} is {value!r}: a number above 0 is needed")

    def _bytes(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            path = self.folder / name
            raise ModelError(f"{path}: {why_not_itself(path) or error.strerror}") from None

    def _read_tensors(self, weights: bytes) -> None:
        path = self.folder / WEIGHTS
        try:
            tensors = load(weights)
        except (SafetensorError, ValueError, KeyError) as error:
            reason = why_not_itself(path) or f"truncated or not a safetensors file ({error})"
            raise ModelError(f"{path}: {reason}") from None
        for name, tensor in tensors.items():
            if (match := _TENSOR.fullmatch(name)) is None:
                raise self._wrong(name, "is no low-rank part of a linear layer")
            self._pairs.setdefault(match[1], {})[match[2]] = self._checked(name, tensor)
        for module, pair in self._pairs.items():
            if len(pair) < 2:
                raise self._wrong(module, f"has no lora_{'B' if 'A' in pair else 'A'}")
        if not self._pairs:
            raise ModelError(f"{path}: holds no tensor")

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype not in FLOATS or tensor.dim() != 2:
            raise self._wrong(name, f"is {tensor.dtype} of {tensor.dim()} dimensions, not a matrix of floats")
        if not bool(torch.isfinite(tensor).all()):
            raise self._wrong(name, "holds values that are NaN or infinite")
        return tensor

    def _rank(self, module: str) -> int:
        rank = self._of_pattern("rank_pattern", module, self._config["r"])
        if rank > MAX_RANK:
            raise self._wrong(module, f"has rank {rank}, at most {MAX_RANK} is served")
        return rank

    def _scale(self, module: str, rank: int) -> float:
        alpha = self._of_pattern("alpha_pattern", module, self._config["lora_alpha"])
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _of_pattern(self, key: str, module: str, default):
        """Return the value of the first pattern that matches the end of the module's name, as PEFT matches them."""
        for pattern, value in (self._config.get(key) or {}).items():
            try:
                if re.match(rf"(.*\.)?({pattern})$", module):
                    return value
            except re.error as error:
                raise ModelError(f"{self.folder / CONFIG}: {key} {pattern!r}: {error}") from None
        return default

    def _wrong(self, name: str, what: str) -> ModelError:
        return ModelError(f"{self.folder / WEIGHTS}: {name} {what}")
