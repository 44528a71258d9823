"""The table of served families, and the reader of a spec from a model folder or a .gguf file."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from baton.engine.core.model_errors import ModelError, read_json
from baton.engine.core.model_spec import WRONG_VALUE, ModelSpec
from baton.engine.families.config import Config, check_kinds
from baton.engine.families.dense import cohere, exaone, gemma, glm, granite, llama, olmo, phi, qwen, starcoder
from baton.engine.families.hybrid import bamba, falcon_h1, granite_hybrid, jamba, mamba2, nemotron_h, qwen3_next
from baton.engine.families.mixture import deepseek, gpt_oss, granite_moe, llama4, mixtral, olmoe, qwen_moe
from baton.engine.families.unserved import explanation
from baton.gguf import GGUFError, is_gguf

ARCHITECTURES: dict[str, Callable[[Config], ModelSpec]] = {
    "LlamaForCausalLM": llama.llama,
    "MistralForCausalLM": llama.mistral,
    "MinistralForCausalLM": llama.ministral,
    "SmolLM3ForCausalLM": llama.smollm3,
    "Qwen2ForCausalLM": qwen.qwen2,
    "Qwen3ForCausalLM": qwen.qwen3,
    "Gemma2ForCausalLM": gemma.gemma2,
    "Gemma3ForCausalLM": gemma.gemma3,
    "Phi3ForCausalLM": phi.phi3,
    "Olmo2ForCausalLM": olmo.olmo2,
    "Olmo3ForCausalLM": olmo.olmo3,
    "GraniteForCausalLM": granite.granite,
    "Glm4ForCausalLM": glm.glm4,
    "CohereForCausalLM": cohere.cohere,
    "Cohere2ForCausalLM": cohere.cohere2,
    "Starcoder2ForCausalLM": starcoder.starcoder2,
    "Exaone4ForCausalLM": exaone.exaone4,
    "MixtralForCausalLM": mixtral.mixtral,
    "Qwen2MoeForCausalLM": qwen_moe.qwen2_moe,
    "Qwen3MoeForCausalLM": qwen_moe.qwen3_moe,
    "OlmoeForCausalLM": olmoe.olmoe,
    "GraniteMoeForCausalLM": granite_moe.granite_moe,
    "GptOssForCausalLM": gpt_oss.gpt_oss,
    "Llama4ForCausalLM": llama4.llama4,
    "DeepseekV2ForCausalLM": deepseek.deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek.deepseek_v3,
    "Mamba2ForCausalLM": mamba2.mamba2,
    "GraniteMoeHybridForCausalLM": granite_hybrid.granite_hybrid,
    "BambaForCausalLM": bamba.bamba,
    "FalconH1ForCausalLM": falcon_h1.falcon_h1,
    "NemotronHForCausalLM": nemotron_h.nemotron_h,
    "JambaForCausalLM": jamba.jamba,
    "Qwen3NextForCausalLM": qwen3_next.qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_next.qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_next.qwen3_5_moe,
}


class TextModel(NamedTuple):
    """Describe a text model within another: its architecture by itself, the `model_type` of its `text_config`, the
    prefix of its tensors, and config values that are left out. The rest of the outer model is not read."""

    architecture: str
    model_type: str
    renamed: tuple[tuple[str, str], ...] = (("", "language_model."),)
    left_out: Mapping[str, object] = MappingProxyType({})


WITHIN = (("model.", "model.language_model."),)
GEMMA3_SIZES = MappingProxyType({"num_attention_heads": 8, "vocab_size": 262_208})
AROUND = {
    "Llama4ForConditionalGeneration": TextModel("Llama4ForCausalLM", "llama4_text"),
    "Gemma3ForConditionalGeneration": TextModel("Gemma3ForCausalLM", "gemma3_text", left_out=GEMMA3_SIZES),
    "Mistral3ForConditionalGeneration": TextModel("MistralForCausalLM", "mistral"),
    "Qwen3VLForConditionalGeneration": TextModel("Qwen3ForCausalLM", "qwen3_vl_text", WITHIN),
    "Qwen3_5ForConditionalGeneration": TextModel("Qwen3_5ForCausalLM", "qwen3_5_text", WITHIN),
    "Qwen3_5MoeForConditionalGeneration": TextModel("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", WITHIN),
}


def read_spec(folder: str | Path) -> ModelSpec:
    """Return what config.json and, if present, generation_config.json say, or the metadata of a .gguf file.

    Raises ModelError.
    """
    folder = Path(folder)
    if is_gguf(folder):
        return _from_gguf(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such model folder")
    path = folder / "config.json"
    config = read_json(path)
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if os.path.lexists(generation_path) else {}
    try:
        return _spec(folder, config, generation)
    except KeyError as error:
        raise ModelError(f"{path}: {error.args[0]} is missing") from None
    except WRONG_VALUE as error:
        raise ModelError(f"{path}: {error}") from None


def _from_gguf(path: Path) -> ModelSpec:
    # Imported late: a worker's settings import this module, and its --help should not wait for numpy.
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
    check_kinds(config)
    for architecture in config.get("architectures") or ():
        if architecture in ARCHITECTURES:
            return _read(architecture, Config(folder, config, generation))
        if architecture in AROUND:
            return _within(AROUND[architecture], folder, config, generation)
    raise ValueError(explanation(config, (*ARCHITECTURES, *AROUND)))


def _read(architecture: str, config: Config) -> ModelSpec:
    """Read a config by its family. Raises ValueError for a router that the family's reader does not know, and
    for options of transformers that no reader here supports: attention to later tokens, and layers with their
    own values."""
    config.refuse("is_causal", True)
    config.refuse("per_layer_config", {})
    spec = ARCHITECTURES[architecture](config)
    for scoring in {layer.experts.scoring for layer in spec.layers if layer.experts is not None}:
        config.refuse("scoring_func", scoring)
    return spec


def _within(model: TextModel, folder: Path, config: dict, generation: dict) -> ModelSpec:
    if not isinstance(text := config.get("text_config"), dict):
        raise ValueError(f"text_config is {text!r:.40}, not an object")
    if (found := text.get("model_type", model.model_type)) != model.model_type:
        raise ValueError(f"text_config is of model_type {found!r:.40}; what is served within is {model.model_type!r}")
    values = {**model.left_out, **config, **text}
    for key in ("tie_word_embeddings", "eos_token_id"):  # head and generate() are the outer model's
        if (outer := config.get(key)) is not None:
            values[key] = outer
    spec = _read(model.architecture, Config(folder, values, generation))
    return replace(spec, names=replace(spec.names, renamed=(*model.renamed, *spec.names.renamed)))
