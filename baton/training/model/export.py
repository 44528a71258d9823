"""Export a trained model as a folder that transformers, and every engine that reads its format, can load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from baton.training.data.files import save_atomically, save_text
from baton.training.data.tokenizer import END, END_OF_TEXT, save_tokenizer
from baton.training.model.llama import Llama, ModelConfig
from baton.training.model.mixture import Mixture, MixtureConfig

_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_length",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "norm_eps",
}
"""Names in config.json -> names in ModelConfig."""


def export(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, generation config, bf16 weights and tokenizer; each file appears complete or not at all.

    The weights come last, so a reader that finds new weights finds the other files new too."""
    folder.mkdir(parents=True, exist_ok=True)
    save_text(folder / "config.json", _to_json(_config(model.config, tokenizer)))
    save_text(folder / "generation_config.json", _to_json(_generation_config(tokenizer)))
    save_tokenizer(tokenizer, folder, model.config.max_length)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_atomically(folder / "model.safetensors", lambda path: save_file(weights, str(path), metadata={"format": "pt"}))


def load(folder: Path) -> Llama:
    """Read an exported model in fp32. Raises FileNotFoundError if the folder holds none."""
    values = json.loads((folder / "config.json").read_text())
    shape = {field: values[name] for name, field in _FIELDS.items()}
    if "num_experts" in values:
        chosen = {"num_experts": values["num_experts"], "num_chosen": values["num_experts_per_tok"]}
        model = Mixture(MixtureConfig(**shape, **chosen))
    else:
        model = Llama(ModelConfig(**shape))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def _config(config: ModelConfig, tokenizer: Tokenizer) -> dict:
    family = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
    if isinstance(config, MixtureConfig):
        family = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": config.intermediate_size,
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_chosen,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return {
        **family,
        **{name: getattr(config, field) for name, field in _FIELDS.items()},
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "eos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _generation_config(tokenizer: Tokenizer) -> dict:
    """Return a config for greedy sampling that ends with a document or a chat turn."""
    return {
        "do_sample": False,
        "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "eos_token_id": [tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END)],
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }


def _to_json(values: dict) -> str:
    return json.dumps(values, indent=2) + "\n"
