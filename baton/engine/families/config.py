"""Check the values of a config.json as they are asked for, and build the spec from them and from what a family adds."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baton.engine.core.model_spec import PREDICTOR, LayerSpec, ModelSpec, NormSpec, RopeSpec

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
SLIDING, FULL = "sliding_attention", "full_attention"
_ORIGINAL = "original_max_position_embeddings"
_BESIDE_SCALING = ("rope_theta", "partial_rotary_factor")  # keys that a `rope_scaling` need not have
_ROPE_NUMBERS = (
    "factor", "attention_factor", "attn_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor",
    "mscale", "mscale_all_dim",
)  # fmt: skip
_ROPE_SWITCHES = ("mscale", "mscale_all_dim")  # of which 0 means none
_ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
# Limits on what a folder claims: no billion layers are made before the first weight is looked up.
_MAX_LAYERS, _MAX_COUNT = 4096, 2**31 - 1
# Types of keys that no method of Config checks; null is allowed.
_KINDS = {
    "a list": (list, ("architectures", "layer_types", "no_rope_layers", "moe_layers", "mlp_only_layers")),
    "an object": (dict, ("rope_parameters", "rope_scaling")),
    "a whole number": (int, ("max_window_layers", "first_k_dense_replace", "num_nextn_predict_layers")),
}


class Config:
    """Read one config.json. All methods raise KeyError for a missing value, ValueError for a wrong one."""

    def __init__(self, folder: Path, values: dict, generation: dict):
        self.folder, self.values, self.generation = folder, values, generation
        check_kinds(values)
        named = values.get("layers_block_type")  # if present, it may be the only key that implies the number of layers
        self.num_layers = self.count("num_hidden_layers", len(named) or None if isinstance(named, list) else None)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer; absent and null both mean the default."""
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise KeyError(key)
        return counted(key, value)

    def number(self, key: str, default: float) -> float:
        """Return a number over 0."""
        return positive(key, self.values.get(key, default))

    def number_or_none(self, key: str, default: float | None) -> float | None:
        """Return a number over 0, or None if the file says null."""
        value = self.values.get(key, default)
        return None if value is None else positive(key, value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false; null is false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool | None):
            raise ValueError(f"{key} is {value!r:.40}, not true or false")
        return bool(value)

    def activation(self, key: str = "hidden_act", default: str = "silu") -> str:
        """Return the MLP's activation as ModelSpec names it."""
        name = self.values.get(key) or default
        if name not in ACTIVATIONS:
            raise ValueError(f"{key} {name!r} is not supported, one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def refuse(self, key: str, *harmless: object) -> None:
        """Raise ValueError if `key` has a value other than null and these, since it would change what the layers
        compute."""
        if (value := self.values.get(key)) is not None and value not in harmless:
            raise ValueError(f"{key} {value!r:.40} is not supported")

    def rope(
        self,
        context: int,
        theta: float = 10_000.0,
        partial: float = 1.0,
        interleaved: bool = False,
        parameters: dict | None = None,
        head_dim: int | None = None,
        renamed: Mapping[str, str] = MappingProxyType({}),
    ) -> RopeSpec:
        """Return the rope by `rope_parameters` (transformers 5) or `rope_scaling` beside `rope_theta` (before). The
        arguments are defaults for what the file does not say; `parameters` replace the file's. `renamed`: the file's
        names of kinds that a family means others by."""
        if parameters is None and (parameters := self.values.get("rope_parameters")):
            self._check_scaling(parameters)
        parameters = _typed(parameters or self.values.get("rope_scaling") or {})
        kind = parameters.pop("rope_type")
        if kind not in (*ROPE_KINDS, *renamed):
            raise ValueError(f"rope type {kind!r} is not supported, one of {', '.join(ROPE_KINDS)}")
        kind = renamed.get(kind, kind)
        part = parameters.pop("partial_rotary_factor", None) or self.values.get("partial_rotary_factor") or partial
        theta = parameters.pop("rope_theta", None) or self.values.get("rope_theta") or theta
        longest = self.count("max_position_embeddings", context)
        # If both places give the original context, transformers prefers the outer one.
        inner = parameters.pop(_ORIGINAL, None)
        original = self.values.get(_ORIGINAL) or inner or longest
        for key in _ROPE_NEEDS.get(kind, ()):
            if key not in parameters:
                raise KeyError(f"{key} of rope type {kind}")
        for name in _ROPE_NUMBERS:
            if parameters.get(name) is not None and not (name in _ROPE_SWITCHES and parameters[name] == 0):
                positive(name, parameters[name])
        made = RopeSpec(
            kind=kind,
            theta=positive("rope_theta", theta),
            max_position_embeddings=longest,
            original_context=counted(_ORIGINAL, original),
            parameters=parameters,
            rotary_dim=self._rotary_dim(part, head_dim),
            interleaved=interleaved,
        )
        counted("the context", made.context)
        return made

    def ropes_by_type(self, context: int, theta: float, local_theta: float) -> tuple[RopeSpec, RopeSpec]:
        """Return the ropes of full and of sliding layers: by `rope_parameters` for each layer type, or in older files
        by scaling for full layers only and `rope_local_base_freq`."""
        found = self.values.get("rope_parameters") or {}
        if FULL not in found and SLIDING not in found:
            local = {"rope_theta": self.values.get("rope_local_base_freq") or local_theta}
            return self.rope(context, theta), self.rope(context, parameters={"rope_type": "default", **local})
        self._check_scaling(found.get(FULL) or {})
        full, sliding = ({"rope_type": "default", **(found.get(kind) or {})} for kind in (FULL, SLIDING))
        full.setdefault("rope_theta", self.values.get("rope_theta") or theta)
        sliding.setdefault("rope_theta", local_theta)
        return self.rope(context, parameters=full), self.rope(context, parameters=sliding)

    def sliding(self, default: Callable[[int], bool]) -> tuple[bool, ...]:
        """Return whether each layer sees a window only: by `layer_types` or, without that key, by its index."""
        types = self.values.get("layer_types")
        if types is None:
            return tuple(default(layer) for layer in range(self.num_layers))
        if len(types) != self.num_layers:
            raise ValueError(f"layer_types names {len(types)} layers of {self.num_layers}")
        if unknown := [kind for kind in types if kind not in (SLIDING, FULL)]:
            raise ValueError(f"layer_types: {unknown[0]!r:.40} is not supported, one of {SLIDING}, {FULL}")
        return tuple(kind == SLIDING for kind in types)

    def alternating(self, default: Callable[[int], bool], window: int = 4096, **kinds: Any) -> tuple[LayerSpec, ...]:
        """Return layers some of which have a window, `sliding_window`. `kinds`: `full` and `sliding`, the rope of each
        (default 0)."""
        sliding, size = self.sliding(default), None
        if any(sliding):
            size = self.count("sliding_window", window)
        ropes = kinds.get("full", 0), kinds.get("sliding", 0)
        return tuple(LayerSpec(size if is_sliding else None, ropes[is_sliding]) for is_sliding in sliding)

    def same_layers(self, window: int | None = None) -> tuple[LayerSpec, ...]:
        """Return equal layers, all with this window (None: the whole context) and one rope."""
        return (LayerSpec(window),) * self.num_layers

    def window(self, default: int | None = None) -> int | None:
        """Return `sliding_window`; None if the file says null."""
        value = self.values.get("sliding_window", default)
        return None if value is None else counted("sliding_window", value)

    def spec(
        self,
        family: str,
        ropes: Sequence[RopeSpec],
        layers: tuple[LayerSpec, ...] | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        norm: NormSpec | None = None,
        tied: bool = False,
        **differences: Any,
    ) -> ModelSpec:
        """Return the spec of a family, by default one of Llama's layers. `num_kv_heads`, `head_dim` and `tied` are
        defaults for what the file does not say; `differences` are fields of ModelSpec."""
        num_heads, hidden_size = self.count("num_attention_heads"), self.count("hidden_size")
        kv_heads = self.count("num_key_value_heads", num_kv_heads or num_heads)
        size = self._head_dim(head_dim)
        if num_heads % kv_heads:
            raise ValueError(f"{num_heads} attention heads do not divide into {kv_heads} KV heads")
        if size % 2:
            raise ValueError(f"head_dim {size} is odd, rotary embedding needs pairs")
        vocab_size = self.count("vocab_size")
        beside = "eos_token_id" in self.generation
        ends = _ids((self.generation if beside else self.values).get("eos_token_id"), vocab_size, beside)
        return ModelSpec(
            folder=self.folder,
            family=family,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=self.count("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            head_dim=size,
            norm=norm or self.norm(),
            ropes=tuple(ropes),
            layers=layers or self.same_layers(),
            tied=self.flag("tie_word_embeddings", tied),
            dtype=self._dtype(),
            eos_token_ids=ends,
            generation_config=self.generation,
            **({"activation": self.activation()} | differences),
        )

    def norm(self, eps: float = 1e-6, **differences: Any) -> NormSpec:
        """Return RMS norm with `rms_norm_eps`; `differences` are fields of NormSpec."""
        return NormSpec(self.number("rms_norm_eps", eps), **differences)

    def _check_scaling(self, parameters: dict) -> None:
        """Raise ValueError if `rope_scaling` contradicts `rope_parameters`, since transformers would use it instead,
        base included."""
        beside = {key: parameters[key] for key in _BESIDE_SCALING if key in parameters}
        scaling = self.values.get("rope_scaling")
        if scaling and _typed(beside | scaling) != _typed(parameters):
            raise ValueError(
                "rope_scaling differs from rope_parameters; put what is meant into rope_parameters and leave it out"
            )

    def _rotary_dim(self, part: object, head_dim: int | None) -> int | None:
        if (share := positive("partial_rotary_factor", part)) == 1:
            return None
        head_dim = self._head_dim(head_dim)
        size = int(head_dim * share)
        if share > 1 or size < 2 or size % 2:
            raise ValueError(f"partial_rotary_factor {share:g} turns {size} of {head_dim} elements, not pairs of them")
        return size

    def _head_dim(self, assumed: int | None) -> int:
        """Return the elements of a head: the file's, else `assumed`, else an equal part of a row."""
        return self.count("head_dim", assumed or self.count("hidden_size") // self.count("num_attention_heads"))

    def _dtype(self) -> str:
        name = self.values.get("dtype") or self.values.get("torch_dtype") or "float32"
        if name not in DTYPES:
            raise ValueError(f"dtype {name!r} is not supported, one of {', '.join(DTYPES)}")
        return DTYPES[name]


def around_predictor(names: dict[str, str], prefix: str) -> tuple[tuple[str, str], ...]:
    """Return the names of the modules around a predictor layer: `names` as PredictorSpec has them, and as the
    checkpoint has them below `prefix`."""
    return tuple((f"{PREDICTOR}.{own}.", f"{prefix}{name}.") for own, name in names.items())


def check_kinds(values: dict) -> None:
    """Raise ValueError for a value that has to be a list, object or number and is not."""
    for words, (kind, keys) in _KINDS.items():
        for key in keys:
            value = values.get(key)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise ValueError(f"{key} is {value!r:.40}, not {words}")


def counted(key: str, value: object) -> int:
    """Return a positive integer within the limits."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}, not a positive integer")
    if value > (most := _MAX_LAYERS if key == "num_hidden_layers" else _MAX_COUNT):
        raise ValueError(f"{key} is {value}, at most {most} is believed")
    return value


def positive(name: str, value: object) -> float:
    """Return a finite number over 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r:.40}, not a number over 0")
    return float(value)


def _typed(parameters: dict) -> dict:
    """Return a rope's parameters with its type as `rope_type`, which older files call `type`."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    return {key: value for key, value in parameters.items() if key != "type"} | {"rope_type": kind}


def _ids(value: Any, vocab_size: int, is_beside: bool) -> tuple[int, ...]:
    """Return token ids, checked. `is_beside`: they come from generation_config.json."""
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            which = f"eos_token_id {token_id!r:.40}{' of generation_config.json' if is_beside else ''}"
            raise ValueError(f"{which} is not one of the vocabulary, which has {vocab_size} ids")
    return ids
