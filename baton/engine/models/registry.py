"""The table of served families, and from a model folder or a .gguf file to its spec."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from baton.engine.core.model_errors import ModelError, read_json
from baton.engine.core.model_spec import WRONG_VALUE, ModelSpec
from baton.engine.families.config import Config
from baton.engine.families.dense import cohere, exaone, gemma, glm, granite, llama, olmo, phi, qwen, starcoder
from baton.engine.families.hybrid import bamba, falcon_h1, granite_hybrid, jamba, mamba2, nemotron_h, qwen3_next
from baton.engine.families.mixture import deepseek, gpt_oss, granite_moe, llama4, mixtral, olmoe, qwen_moe
from baton.engine.families.unserved import refusal
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
}

# Models around a text model, whose config is `text_config` and whose tensors stand below TEXT: what is around stays unread.
AROUND = {"Llama4ForConditionalGeneration": "Llama4ForCausalLM"}
TEXT = "language_model."


def read_spec(folder: str | Path) -> ModelSpec:
    """Return what config.json and, where there is one, generation_config.json say; or the metadata of a .gguf file.

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
    for architecture in config.get("architectures") or ():
        if architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture](Config(folder, config, generation))
        if architecture in AROUND:
            return _within(ARCHITECTURES[AROUND[architecture]], folder, config, generation)
    raise ValueError(refusal(config, (*ARCHITECTURES, *AROUND)))


def _within(read: Callable[[Config], ModelSpec], folder: Path, config: dict, generation: dict) -> ModelSpec:
    if not isinstance(text := config.get("text_config"), dict):
        raise ValueError(f"text_config is {text!r:.40}, not an object")
    spec = read(Config(folder, config | text, generation))
    return replace(spec, names=replace(spec.names, renamed=(("", TEXT), *spec.names.renamed)))
