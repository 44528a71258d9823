"""A model folder in the making: it is written beside its place under a hidden name, and renamed once it is complete."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from baton.quantization.core.errors import QuantizeError

SHARD_BYTES = 2 << 30  # kept in memory before it is written
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
WEIGHT_INDEX = ".index.json"
TEMPLATES = "additional_chat_templates"


@contextmanager
def new_folder(out: Path) -> Iterator["FolderWriter"]:
    """Yield a writer. `out` appears if the block succeeds, and nothing is left otherwise. Raises QuantizeError if `out`
    exists."""
    if out.exists() or out.is_symlink():
        raise QuantizeError(f"{out} already exists; choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield FolderWriter(folder)
        folder.chmod(0o755)
        os.rename(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class FolderWriter:
    """Writes tensors to shards as they come. The shards are named at the end, when their number is known."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        self._held_bytes = self._total_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Keep tensors of any shape [...] by name, and write a shard when they fill one."""
        self._held |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self._held_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self._held_bytes >= SHARD_BYTES:
            self._flush()

    def finish(self, source: Path, config: dict) -> None:
        """Write the remaining tensors, config.json, and copies of the source's other files (tokenizer, licence,
        templates)."""
        self._flush()
        count = len(self._shards)
        names = [f"model-{index + 1:05}-of-{count:05}.safetensors" for index in range(count)]
        names = names if count > 1 else ["model.safetensors"]
        for index, name in enumerate(names):
            os.rename(self._folder / _shard(index), self._folder / name)
            (self._folder / name).chmod(0o644)
        if count > 1:
            weight_map = {tensor: name for name, shard in zip(names, self._shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._folder / f"model.safetensors{WEIGHT_INDEX}").write_text(json.dumps(index, indent=1) + "\n")
        (self._folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for path in sorted(source.iterdir()):
            is_own = path.name == "config.json" or path.name.endswith((*WEIGHT_SUFFIXES, WEIGHT_INDEX))
            if path.is_file() and not is_own:
                shutil.copyfile(path, self._folder / path.name)
        if (source / TEMPLATES).is_dir():
            shutil.copytree(source / TEMPLATES, self._folder / TEMPLATES)

    def _flush(self) -> None:
        if not self._held:
            return
        path = self._folder / _shard(len(self._shards))
        try:
            save_file(self._held, path, metadata={"format": "pt"})
        except SafetensorError as exc:  # not an OSError, though mostly caused by one
            raise OSError(f"{path}: not written: {exc}") from exc
        self._shards.append(list(self._held))
        self._total_bytes += self._held_bytes
        self._held, self._held_bytes = {}, 0


def _shard(index: int) -> str:
    return f"shard-{index}.safetensors"
