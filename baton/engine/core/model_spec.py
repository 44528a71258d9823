"""Read what a model declares before any weight is read: config.json and generation_config.json, or GGUF metadata."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.engine.core.model_errors import ModelError, read_json
from baton.gguf import GGUFError, is_gguf
from kvtransfer.layout import KVGroup

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# What transformers assumes where a config.json is silent.
CONTEXT = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
HEAD_DIM = {"qwen3": 128}
_ORIGINAL = "original_max_position_embeddings"
_ROPE_NUMBERS = (
    "factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale",
    "mscale_all_dim",
)  # fmt: skip
# What a value of the wrong type raises, somewhere.
WRONG_VALUE = (TypeError, ValueError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding as the config gives it; `parameters` are the kind's own (factor, betas, factor lists)."""

    kind: str
    theta: float
    max_position_embeddings: int
    original_context: int  # the context that the model was trained at, before scaling
    parameters: dict = field(default_factory=dict)

    @property
    def context(self) -> int:
        """Tokens that can be served by default. Longrope: the original context, where short and long factors part."""
        if self.kind == "longrope":
            return self.original_context
        if self.kind in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.parameters["factor"])
        if self.kind == "yarn":
            scaled = int(self.original_context * (self.parameters.get("factor") or 1))
            return max(self.max_position_embeddings, scaled)
        return self.max_position_embeddings


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Family, shapes and conventions of one model. Sizes in elements, `context` in tokens."""

    folder: Path  # or a .gguf file
    family: str  # llama | mistral | qwen2 | qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]  # per layer: how many positions back a token sees, itself included; None: all
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    dtype: str  # the checkpoint's: bf16 | fp16 | fp32
    eos_token_ids: tuple[int, ...]
    generation_config: dict

    @property
    def context(self) -> int:
        """Tokens of a sequence, where nothing else is asked for."""
        return self.rope.context

    @property
    def longest_context(self) -> int:
        """Return the longest context that may be asked for: more than `context` for longrope only, which then takes its
        long factors."""
        return max(self.rope.context, self.rope.max_position_embeddings)

    @property
    def name(self) -> str:
        return self.folder.stem if is_gguf(self.folder) else self.folder.name

    def kv_group(self, form: str, block_size: int) -> KVGroup:
        """Return the layout of this model's KV in a pool. Windowed layers keep all tokens too."""
        return KVGroup("paged", self.num_layers, self.num_kv_heads, self.head_dim, form, block_size)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelSpec":
        """Read config.json and, where there is one, generation_config.json; or the metadata of a .gguf file.

        Raises ModelError."""
        folder = Path(folder)
        if is_gguf(folder):
            return _from_gguf(folder)
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such model folder")
        path = folder / "config.json"
        config = read_json(path)
        generation_path = folder / "generation_config.json"
        generation = read_json(generation_path) if generation_path.exists() else {}
        try:
            return _spec(folder, config, generation)
        except KeyError as error:
            raise ModelError(f"{path}: {error.args[0]} is missing") from None
        except WRONG_VALUE as error:
            raise ModelError(f"{path}: {error}") from None


def _from_gguf(path: Path) -> ModelSpec:
    # Not above: settings of a worker import this, and its --help should not wait for numpy.
    from baton.engine.core.gguf_file import GGUFFile, config_of

    file = GGUFFile(path)
    try:
        return _spec(path, config_of(file), {})
    except GGUFError as error:
        raise ModelError(str(error)) from None
    except KeyError as error:
        raise ModelError(f"{path}: metadata: {error.args[0]} is missing") from None
    except WRONG_VALUE as error:
        raise ModelError(f"{path}: metadata: {error}") from None


def _spec(folder: Path, config: dict, generation: dict) -> ModelSpec:
    family = _family(config)
    num_heads = _count(config, "num_attention_heads")
    hidden_size = _count(config, "hidden_size")
    num_kv_heads = _count(config, "num_key_value_heads", KV_HEADS.get(family, num_heads))
    head_dim = _count(config, "head_dim", HEAD_DIM.get(family, hidden_size // num_heads))
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} attention heads do not divide into {num_kv_heads} KV heads")
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd, rotary embedding needs pairs")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported, only silu")
    num_layers = _count(config, "num_hidden_layers")
    bias = bool(config.get("attention_bias", False)) and family in ("llama", "qwen3")
    return ModelSpec(
        folder=folder,
        family=family,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=_positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        rope=_rope(family, config),
        windows=_windows(family, config, num_layers),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
        dtype=_dtype(config),
        eos_token_ids=_ids(generation.get("eos_token_id", config.get("eos_token_id")), _count(config, "vocab_size")),
        generation_config=generation,
    )


def _family(config: dict) -> str:
    architectures = config.get("architectures") or ["(none given)"]
    for architecture in architectures:
        if architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture]
    known = ", ".join(ARCHITECTURES)
    raise ValueError(f"architecture {architectures[0]} is not supported, one of {known}")


# A folder's word is not reason enough to make a billion layers before the first weight is looked for.
_MAX_LAYERS, _MAX_COUNT = 4096, 2**31 - 1


def _count(config: dict, key: str, default: int | None = None) -> int:
    """A positive integer; absent and null both mean the default."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise KeyError(key)
    return _counted(key, value)


def _counted(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}, not a positive integer")
    if value > (most := _MAX_LAYERS if key == "num_hidden_layers" else _MAX_COUNT):
        raise ValueError(f"{key} is {value}, at most {most} is believed")
    return value


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r:.40}, not a number over 0")
    return float(value)


def _dtype(config: dict) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported, one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _rope(family: str, config: dict) -> RopeSpec:
    """From `rope_parameters` (transformers 5) or `rope_scaling` beside `rope_theta` (before)."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    old_name = parameters.pop("type", None)
    kind = parameters.pop("rope_type", None) or old_name or "default"
    if kind not in ROPE_KINDS:
        raise ValueError(f"rope type {kind!r} is not supported, one of {', '.join(ROPE_KINDS)}")
    if parameters.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    longest = _count(config, "max_position_embeddings", CONTEXT[family])
    # Where both places give the original context, transformers lets the outer one win.
    inner = parameters.pop(_ORIGINAL, None)
    original = config.get(_ORIGINAL) or inner or longest
    needed = {"linear": ("factor",), "dynamic": ("factor",), "longrope": ("short_factor", "long_factor")}
    needed["llama3"] = ("factor", "low_freq_factor", "high_freq_factor")
    for key in needed.get(kind, ()):
        if key not in parameters:
            raise KeyError(f"{key} of rope type {kind}")
    for name in _ROPE_NUMBERS:
        if parameters.get(name) is not None:
            _positive(name, parameters[name])
    made = RopeSpec(kind, _positive("rope_theta", theta), longest, _counted(_ORIGINAL, original), parameters)
    _counted("the context", made.context)
    return made


def _windows(family: str, config: dict, num_layers: int) -> tuple[int | None, ...]:
    if family == "llama":
        return (None,) * num_layers
    window = config.get("sliding_window", 4096)
    if window is not None and (family == "mistral" or config.get("use_sliding_window")):
        _counted("sliding_window", window)
    if family == "mistral":
        return (window,) * num_layers
    if not config.get("use_sliding_window", False) or window is None:
        return (None,) * num_layers
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(types) != num_layers:
        raise ValueError(f"layer_types names {len(types)} layers of {num_layers}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise ValueError(f"eos_token_id {token_id!r:.40} is not one of the vocabulary, which has {vocab_size} ids")
    return ids
