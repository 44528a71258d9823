"""Explain that a family is not served: name the nearest one that is, and what the config.json needs besides."""

from difflib import SequenceMatcher

# A key of config.json -> the feature it turns on. Null, false and 0 turn nothing on.
ASKS = {
    "is_encoder_decoder": "an encoder",
    "vision_config": "a vision encoder",
    "audio_config": "an audio encoder",
    "text_config": "a text model within another",
    "state_size": "state-space layers of another kind",
    "ssm_state_size": "state-space layers of another kind",
    "mamba_d_state": "state-space layers of another kind",
    "linear_num_key_heads": "linear attention",
    "full_attention_interval": "linear attention",
    "index_topk": "attention to chosen positions",
    "compress_ratios": "compressed keys",
    "alibi": "ALiBi positions",
    "swiglu_limit": "a clamped SwiGLU",
    "clip_qkv": "clipped q, k, v",
    "num_nextn_predict_layers": "layers that predict further tokens",
    "n_layer": "GPT-2's names of sizes",
    "n_embd": "GPT-2's names of sizes",
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")


def explanation(config: dict, served: tuple[str, ...]) -> str:
    """Return one line on a config whose architecture is not among `served`."""
    found = str((config.get("architectures") or ["(none given)"])[0])
    has_experts = any(config.get(key) for key in EXPERTS)
    nearest = max(served, key=lambda name: _nearness(found, name, has_experts))
    asks = dict.fromkeys(what for key, what in ASKS.items() if config.get(key))
    missing = ", ".join(asks) or "its layers are not described here"
    return f"architecture {found!r:.80} is not supported; the nearest that is: {nearest}; missing: {missing}"


def _nearness(found: str, name: str, has_experts: bool) -> float:
    """Return the similarity of two names by their letters; two families with experts are more similar."""
    likeness = SequenceMatcher(None, found.lower(), name.lower()).ratio()
    return likeness + 0.25 * (
        has_experts == any(part in name for part in ("Moe", "moe", "Mixtral", "GptOss", "Deepseek"))
    )
