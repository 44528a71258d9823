"""The contract of a format: read the tensors of one module, as its publisher stored them, into a weight form."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property

import torch
from torch import Tensor

from baton.engine.core.model_errors import ModelError
from baton.engine.core.model_spec import WRONG_VALUE
from baton.engine.layers.embedding import Embedding
from baton.engine.weights.forms import DenseWeight, Weight
from baton.engine.weights.tensors import Weights, weight_files

HEAD, EMBED = "lm_head", "model.embed_tokens"
CONFIG = "config.json"
_UNTIE = "and config.json has tie_word_embeddings true; set it to false for the head to be used"
_HEADLESS = "the model has no output head; to serve its embeddings alone set tie_word_embeddings to true in config.json"
_ROWS = 4096  # rows of a table compared at a time: a copy of the whole would not be in a start's budget of memory
# Exceptions that a value of quantization_config raises if it has a wrong type or is not a valid expression.
WRONG_CONFIG = (KeyError, re.error, *WRONG_VALUE)
BUFFERS = ("rotary_emb.inv_freq",)  # of old folders; computed here instead
BIAS = ".bias"
OF_MODULES = ("weight", "weight_packed", "_blocks", BIAS)  # ends of names of what a quantized model computes with


class WeightSource(ABC):
    """Read a model's weights by their Hugging Face names."""

    name: str  # gptq, gguf, ...
    device = torch.device("cpu")  # of the tensors that it returns

    def __init__(self) -> None:
        self.notes: dict[str, int] = {}  # what was not read as it is stored -> number of tensors

    @property
    @abstractmethod
    def file_bytes(self) -> int:
        """Return the bytes of the files that hold the weights."""

    @property
    def read_bytes(self) -> int:
        """Return how many of these bytes were read so far; a source that does not count returns all."""
        return self.file_bytes

    @abstractmethod
    def linear(self, module: str, out_features: int, in_features: int) -> Weight:
        """Return the weight [out_features, in_features] of a linear module. Raises ModelError with file and tensor
        name."""

    @abstractmethod
    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a norm, a bias or a table [*shape] in the compute dtype. Raises ModelError with file and
        tensor name."""

    @abstractmethod
    def exact(self, name: str, *shape: int) -> Tensor:
        """Return a tensor [*shape] in fp32, never rounded to the compute dtype, for what is computed in fp32. Raises as
        `tensor` does."""

    def has(self, name: str) -> bool:
        """Return whether a tensor of this name is stored."""
        return False

    def kind(self, module: str) -> Hashable:
        """Return how a module is stored: equal for modules whose tensors have the same names, types and shapes and are
        read by the same scheme; never equal if the source cannot tell."""
        return module

    def expert(
        self, name: str, index: int, count: int, out_features: int, in_features: int, inputs_first: bool = False
    ) -> Weight:
        """Return the weight [out_features, in_features] of one expert in a tensor of `count`, whose inputs come before
        outputs with `inputs_first`. Raises ModelError if the format has no such tensors."""
        raise ModelError(f"{name}: experts in one tensor are not read from {self.name} weights, give a float folder")

    def embedding(self, vocab_size: int, hidden_size: int) -> Callable[[Tensor], Tensor]:
        """Return the embedding: int64 [T] -> [T, hidden_size] in the compute dtype."""
        return Embedding(self.tensor(f"{EMBED}.weight", vocab_size, hidden_size))

    def tied_head(self, embedding: Callable[[Tensor], Tensor], vocab_size: int, hidden_size: int) -> Weight:
        """Return the output head [vocab_size, hidden_size] of a model that ties it: the table that `embedding`
        returned, as a linear weight. Raises ModelError if the files have another head."""
        return DenseWeight(embedding.weight)

    def check_all_read(self, prefix: str, extra: tuple[str, ...] = ()) -> None:
        """Raise ModelError if a tensor below `prefix`, but not below `extra`, was not read: then config.json and
        tensors contradict each other."""

    def release(self) -> None:
        """Release the pages of mapped files, once all is read."""

    def note(self, what: str) -> None:
        self.notes[what] = self.notes.get(what, 0) + 1


class DenseFormat(WeightSource):
    """Read a Hugging Face folder of floating-point weights."""

    name = "dense"

    def __init__(self, tensors: Weights, dtype: torch.dtype):
        """Read `tensors`; dtype is that of computing, to which dense weights are converted."""
        super().__init__()
        self.tensors, self.dtype = tensors, dtype

    @property
    def file_bytes(self) -> int:
        return sum(path.stat().st_size for path in weight_files(self.tensors.folder))

    @property
    def read_bytes(self) -> int:
        return self.tensors.read_bytes

    def has(self, name: str) -> bool:
        return name in self.tensors

    def kind(self, module: str) -> Hashable:
        return self.tensors.kind(module)

    def linear(self, module: str, out_features: int, in_features: int) -> Weight:
        return DenseWeight(self.weight(module, out_features, in_features).to(self.dtype))

    def weight(self, module: str, out_features: int, in_features: int) -> Tensor:
        """Return the weight [out_features, in_features] of a module as stored. Raises as `tensor` does."""
        name = f"{module}.weight"
        if module == HEAD and HEAD not in self.tensors.modules:
            raise ModelError(f"{self.tensors.where(name)}: tensor {name} is missing: {_HEADLESS}")
        return self.tensors.read(name, (out_features, in_features))

    def expert(
        self, name: str, index: int, count: int, out_features: int, in_features: int, inputs_first: bool = False
    ) -> Weight:
        shape = (count, out_features, in_features)
        return DenseWeight(self.tensors.expert(name, index, shape, inputs_first).to(self.dtype))

    def check_all_read(self, prefix: str, extra: tuple[str, ...] = ()) -> None:
        unread = (name for name in self.tensors.unread() if name.startswith(prefix) and not name.startswith(extra))
        if (left := next(filter(self.has_effect, unread), None)) is not None:
            where = self.tensors.where(left)
            raise ModelError(f"{where}: tensor {left} has no place in the model that config.json describes")

    def has_effect(self, name: str) -> bool:
        """Return whether the answers of a model that has this tensor depend on it."""
        return not name.endswith(BUFFERS)

    def tied_head(self, embedding: Callable[[Tensor], Tensor], vocab_size: int, hidden_size: int) -> Weight:
        if (name := f"{HEAD}.weight") in self.tensors:
            own = self.tensors.read(name, (vocab_size, hidden_size)).split(_ROWS)
            pairs = zip(own, embedding.weight.split(_ROWS), strict=True)
            if not all(torch.equal(rows.to(self.dtype), table) for rows, table in pairs):
                raise ModelError(f"{self.tensors.where(name)}: tensor {name} differs from {EMBED}.weight, {_UNTIE}")
        return super().tied_head(embedding, vocab_size, hidden_size)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor [*shape] in the compute dtype. Raises ModelError if it is missing or has another shape or
        type."""
        return self.tensors.read(name, shape).to(self.dtype)

    def exact(self, name: str, *shape: int) -> Tensor:
        return self.tensors.read(name, shape).float()


class Format(DenseFormat):
    """Read a folder with quantized modules. Subclasses say which tensors these have (`quantized`); the rest is
    dense."""

    def __init__(self, tensors: Weights, config: dict, dtype: torch.dtype):
        """Read `tensors` by `config`, the quantization_config of config.json."""
        super().__init__(tensors, dtype)
        self.config = config

    def linear(self, module: str, out_features: int, in_features: int) -> Weight:
        try:
            if self.is_quantized(module):
                return self.quantized(module, out_features, in_features)
        except WRONG_CONFIG as error:
            raise self.wrong_config(f"a value cannot be used for {module} ({why_wrong(error)})") from None
        return super().linear(module, out_features, in_features)

    def expert(
        self, name: str, index: int, count: int, out_features: int, in_features: int, inputs_first: bool = False
    ) -> Weight:
        return WeightSource.expert(self, name, index, count, out_features, in_features, inputs_first)

    def tied_head(self, embedding: Callable[[Tensor], Tensor], vocab_size: int, hidden_size: int) -> Weight:
        if self.is_quantized(HEAD):
            raise self.wrong(self.marker(HEAD), f"is of a head of its own, {_UNTIE}")
        return super().tied_head(embedding, vocab_size, hidden_size)

    def has_effect(self, name: str) -> bool:
        """Return whether this is a weight, or a bias other than zero. Formats store more than they need: zero points of
        symmetric weights, orders, scales of KV, and AutoGPTQ biases of zeros for linears that have none."""
        return name.endswith(OF_MODULES) and not (name.endswith(BIAS) and not self.tensors.read(name).any())

    def is_quantized(self, module: str) -> bool:
        """Return whether the config lists the module as quantized. For the head, and for a module whose weight is a
        float among quantized ones, the tensors decide, since configs do not list all that they leave out."""
        if self.marker(module) in self.tensors:
            return True
        is_left_out = self._holds_quantized and self.tensors.is_float(f"{module}.weight")
        return module != HEAD and not is_left_out

    def is_listed(self, module: str, patterns: Iterable[str] | None) -> bool:
        """Return whether a list of the config names the module, by its requested name or its name in the files."""
        return any(listed(name, patterns) for name in self.names_of(module))

    def names_of(self, module: str) -> tuple[str, str]:
        """Return a module's names: as it is requested, and as in the files, which the config uses."""
        return module, self.tensors.modules.get(module, module)

    @cached_property
    def _holds_quantized(self) -> bool:
        """Return whether any module of the folder is quantized; if none is, config and tensors contradict each
        other."""
        return any(self.marker(module) in self.tensors for module in self.tensors.modules)

    @abstractmethod
    def marker(self, module: str) -> str:
        """Return the name of a tensor that only a quantized module has."""

    @abstractmethod
    def quantized(self, module: str, out_features: int, in_features: int) -> Weight:
        """Read a quantized module, [out_features, in_features]. Raises ModelError if its tensors or the config do not
        fit."""

    # ---- what readers need ----

    def scales(self, name: str, shape: tuple[int, ...] | None) -> Tensor:
        """Return fp32 scales [*shape] (None: any shape). Raises ModelError if one is not finite."""
        kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
        values = self.tensors.read(name, shape, kinds).float()
        if not torch.isfinite(values).all():
            raise ModelError(f"{self.tensors.where(name)}: tensor {name} holds scales that are NaN or infinite")
        return values

    def wrong(self, name: str, what: str) -> ModelError:
        """Return an error about one tensor."""
        return ModelError(f"{self.tensors.where(name)}: tensor {name} {what}")

    def wrong_config(self, what: str) -> ModelError:
        return ModelError(f"{self.tensors.folder / CONFIG}: quantization_config: {what}")

    def num_groups(self, module: str, in_features: int, group: int) -> int:
        """Return the number of groups of `group` inputs. Raises ModelError if they do not divide the inputs."""
        if not isinstance(group, int) or isinstance(group, bool) or group < 1:
            raise self.wrong_config(f"group_size is {group!r:.40}, not a positive integer")
        if in_features % group:
            raise self.wrong(f"{module}.weight", f"has {in_features} inputs, groups of {group} do not divide them")
        return in_features // group


def why_wrong(error: Exception) -> str:
    """Return what is wrong with a value of a config, from one of the exceptions WRONG_CONFIG."""
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)


def listed(module: str, patterns: Iterable[str] | None) -> bool:
    """Return whether a list of modules names this one: by `re:` and a regular expression matched from the start, or by
    whole parts of its dotted name (`lm_head`, `model.layers.0.self_attn`, `down_proj`)."""
    for pattern in patterns or ():
        if pattern.startswith("re:"):
            if re.match(pattern.removeprefix("re:"), module):
                return True
        elif f".{pattern}." in f".{module}.":
            return True
    return False


def unpack_int32(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 [rows, n] to its unsigned integers, uint8 [rows, n * 32 / bits], low bits first (bits: 4 | 8)."""
    # As one dimension, since torch takes [n, 1] as contiguous whatever its last stride is, and then has no view as
    # bytes.
    octets = packed.reshape(-1).view(torch.uint8).unflatten(0, (len(packed), -1))
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=2).flatten(1)
