"""Read the tensors of a Hugging Face folder by name, from mapped safetensors files; nothing is read before it is
requested."""

import math
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.core.model_errors import ModelError, read_json
from baton.gguf import is_gguf
from baton.model_files import why_not_itself

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BASE, BARE = "model.", "embed_tokens.weight"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
STORED_FLOATS = ("F32", "BF16", "F16")  # as safetensors spells them


class Weights:
    """Hold the tensors of one file or of several shards; `read_bytes` counts those that were read."""

    def __init__(self, folder: Path, renamed: Sequence[tuple[str, str]] = ()):
        """Open the files of a folder. `renamed`: prefixes of names as requested, and as in the files."""
        self.folder = folder
        self._source = folder / (INDEX if os.path.lexists(folder / INDEX) else SINGLE)
        self._files: dict[str, tuple[Path, Any]] = {}
        self._read: set[str] = set()
        self.read_bytes = 0
        for path in weight_files(folder):
            file = _open(path)
            for name in file.keys():
                if name in self._files:
                    raise ModelError(f"{path}: tensor {name} is also in {self._files[name][0].name}; shards are mixed")
                self._files[name] = (path, file)
        self._check_index()
        # A decoder saved without embedding and head around it, as embedding models are.
        is_bare = BARE in self._files and not any(name.startswith(BASE) for name in self._files)
        self._stored = {BASE + name if is_bare else _asked(name, renamed): name for name in self._files}
        self._files = {name: self._files[stored] for name, stored in self._stored.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._files)

    def stored_name(self, name: str) -> str:
        """Return the name of a tensor in its file."""
        return self._stored[name]

    @cached_property
    def modules(self) -> dict[str, str]:
        """Return the modules that have tensors: requested name -> name in the files."""
        return {name.rpartition(".")[0]: stored.rpartition(".")[0] for name, stored in self._stored.items()}

    def is_float(self, name: str) -> bool:
        """Return whether a tensor of this name exists and has one of the dtypes FLOATS."""
        return name in self and self._view(name).get_dtype() in STORED_FLOATS

    def kind(self, module: str) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """Return the tensors of a module: the last part of each name, its type as safetensors spells it, its shape."""
        views = ((name.rpartition(".")[2], self._view(name)) for name in self._by_module.get(module, ()))
        return tuple((last, view.get_dtype(), tuple(view.get_shape())) for last, view in views)

    @cached_property
    def _by_module(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in sorted(self._files):
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return found

    def unread(self) -> list[str]:
        """Return the names of tensors that were never read."""
        return [name for name in self._files if name not in self._read]

    def where(self, name: str) -> Path:
        """Return the file that holds a tensor, or that would hold it."""
        return self._files[name][0] if name in self._files else self._source

    def read(self, name: str, shape: tuple[int, ...] | None = None, dtypes: tuple[torch.dtype, ...] = FLOATS) -> Tensor:
        """Return a tensor as stored, [*shape] (None: any shape), of one of these dtypes. Raises ModelError if it is
        missing or does not fit."""
        return self._checked(name, shape, dtypes, lambda file: file.get_tensor(self._stored[name]))

    def slice(self, name: str, index: int, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = FLOATS) -> Tensor:
        """Return part `index` of a tensor [*shape] along its first dimension. Raises as `read` does."""
        return self._checked(name, shape, dtypes, lambda file: file.get_slice(self._stored[name])[index])

    def expert(self, name: str, index: int, shape: tuple[int, int, int], inputs_first: bool) -> Tensor:
        """Return part `index` [out, in] of a tensor [*shape], whose inputs come first with `inputs_first`. Raises as
        `read` does."""
        if not inputs_first:
            return self.slice(name, index, shape)
        count, num_out, num_in = shape
        return self.slice(name, index, (count, num_in, num_out)).t().contiguous()

    def _checked(self, name: str, shape: tuple[int, ...] | None, dtypes, get: Callable[[Any], Tensor]) -> Tensor:
        if name not in self._files:
            raise ModelError(f"{self._source}: tensor {name} is missing")
        path, file = self._files[name]
        found = tuple(self._view(name).get_shape())
        if shape is not None and found != shape:
            raise ModelError(f"{path}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}")
        tensor = get(file)
        if tensor.dtype not in dtypes:
            raise ModelError(
                f"{path}: tensor {name} is {tensor.dtype}, which is not what config.json says of its weights "
                f"({', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)})"
            )
        check_finite(tensor, path, self._stored[name])
        self._read.add(name)
        self.read_bytes += tensor.nbytes
        return tensor

    def _view(self, name: str):
        """Return a tensor in its file, without reading it yet."""
        return self._files[name][1].get_slice(self._stored[name])

    def _check_index(self) -> None:
        """Raise ModelError if a shard lacks a tensor that the index promises, as one of another checkpoint does."""
        if self._source.name != INDEX:
            return
        for name, file in _weight_map(self.folder).items():
            if name not in self._files or self._files[name][0].name != file:
                raise ModelError(f"{self.folder / file}: tensor {name} is not in it, {INDEX} says it is")


def check_finite(tensor: Tensor, path: Path, name: str) -> None:
    """Raise ModelError if a tensor of floats has a value that is not finite: all answers would be one token. The check
    runs at the speed of memory, unlike `isfinite`."""
    if tensor.dtype in FLOATS and tensor.numel() and not all(map(math.isfinite, tensor.aminmax())):
        raise ModelError(f"{path}: tensor {name} holds values that are NaN or infinite")


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder by name; a .gguf file is its own. Raises ModelError."""
    if is_gguf(folder):
        return [folder]
    if os.path.lexists(folder / INDEX):  # also a broken link: the weights are not in one file
        names = set(_weight_map(folder).values())
        if SINGLE not in names and os.path.lexists(folder / SINGLE):
            reason = f"{SINGLE} is beside {INDEX}, which names other files: remove those that do not count"
            raise ModelError(f"{folder}: {reason}")
        return sorted(folder / name for name in names)
    return [folder / SINGLE]


def _asked(stored: str, renamed: Sequence[tuple[str, str]]) -> str:
    """Return the name by which a stored tensor is requested."""
    for ours, theirs in renamed:
        if stored.startswith(theirs):
            return ours + stored.removeprefix(theirs)
    return stored


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
        raise ModelError(f"{path}: {why_not_itself(path) or 'no such file'}")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = why_not_itself(path) or f"truncated or not a safetensors file ({error})"
        raise ModelError(f"{path}: {reason}") from None
