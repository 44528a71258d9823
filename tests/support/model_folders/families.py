"""Small random models of every family, made with transformers, and adapters of them, made with PEFT."""

import copy
from pathlib import Path

import torch
import transformers

SMALL = dict(
    vocab_size=199,
    hidden_size=48,
    intermediate_size=100,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
)
THETA = {"rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
UNCUT = {"truncate": False}
SHORT = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
LONG = [1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
LONGROPE["original_max_position_embeddings"] = 256

PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
PHI_LONGROPE = LONGROPE | dict(short_factor=SHORT[:4], long_factor=LONG[:4])
ALTERNATING = ["sliding_attention", "full_attention"]
BY_TYPE = {"sliding_attention": THETA | {"rope_type": "default"}, "full_attention": THETA | YARN}
GEMMA2 = dict(
    head_dim=16, query_pre_attn_scalar=24, sliding_window=24, attn_logit_softcapping=5.0, tie_word_embeddings=False
)
GEMMA3 = dict(
    head_dim=16,
    query_pre_attn_scalar=24,
    sliding_window=24,
    layer_types=ALTERNATING,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
)
GRANITE = dict(embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.22, attention_multiplier=0.2)
GPT_OSS = dict(head_dim=16, sliding_window=24, layer_types=ALTERNATING, rope_parameters=THETA | YARN | UNCUT)
LATENT = dict(num_key_value_heads=4, kv_lora_rank=24, q_lora_rank=20, qk_rope_head_dim=8, qk_nope_head_dim=12)
LATENT |= dict(
    v_head_dim=10, first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=28
)
GROUPS = dict(n_group=4, topk_group=2, n_shared_experts=2)
ALL_DIM = {"mscale": 1.0, "mscale_all_dim": 0.8}
HYBRID = dict(num_hidden_layers=3, layer_types=["mamba", "attention", "mamba"], pad_token_id=0)
SHARED_MLP = dict(num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=36)
MULTIPLIERS = dict(
    embedding_multiplier=1.5, lm_head_multiplier=0.7, mlp_multipliers=[0.8, 1.2], key_multiplier=0.6,
    attention_out_multiplier=1.1, attention_in_multiplier=0.9, ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
    ssm_in_multiplier=1.3, ssm_out_multiplier=0.8, mamba_d_ssm=128, pad_token_id=0,
)  # fmt: skip
NEMOTRON = dict(
    hidden_size=64, head_dim=16, layers_block_type=["mamba", "mlp", "attention", "mlp", "mamba"], num_hidden_layers=5,
    ssm_state_size=48, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, chunk_size=32, pad_token_id=0,
)  # fmt: skip
NEMOTRON_MOE = NEMOTRON | dict(
    layers_block_type=["mamba", "moe", "attention", "mlp"], num_hidden_layers=4, n_routed_experts=8, n_group=2,
    topk_group=1, num_experts_per_tok=3, moe_intermediate_size=28, moe_shared_expert_intermediate_size=36,
    routed_scaling_factor=1.5,
)  # fmt: skip
MAMBA2 = dict(hidden_size=64, num_heads=8, head_dim=16, state_size=48, n_groups=2, expand=2, chunk_size=32)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=48, mamba_expand=2, mamba_chunk_size=32, hidden_size=64)
QWEN3_NEXT = dict(
    num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], head_dim=16,
    partial_rotary_factor=0.5, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=28, mlp_only_layers=[2],
    shared_expert_intermediate_size=36, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
    linear_value_head_dim=32, pad_token_id=0,
)  # fmt: skip
QWEN3_5 = dict(
    num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], head_dim=16,
    rope_parameters=PARTIAL, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
    linear_value_head_dim=32, pad_token_id=0,
)  # fmt: skip
QWEN3_5_MOE = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=28, shared_expert_intermediate_size=36)
JAMBA = dict(
    num_hidden_layers=3, attn_layer_period=3, attn_layer_offset=1, num_experts=5, mamba_d_state=8, pad_token_id=0,
)  # fmt: skip
LLAMA4 = dict(
    num_hidden_layers=3, head_dim=16, no_rope_layers=[1, 0, 1], moe_layers=[0, 1], attention_chunk_size=24,
    intermediate_size_mlp=100, num_local_experts=5, num_experts_per_tok=1, floor_scale=16, attn_scale=0.4,
)  # fmt: skip
EXPERTS = dict(moe_intermediate_size=28, num_experts_per_tok=3)

# Weights of Qwen3-Next and Qwen3.5 that are drawn smaller: those of norms, to which the model adds one, and of decays:
# of a state that forgets at once only rounding is left, which the norms behind it make large (3e-4 of a logit, here as
# in transformers).
DRAWN_SMALLER = (
    "layernorm.weight",
    "q_norm.weight",
    "k_norm.weight",
    "model.norm.weight",
    "A_log",
    "language_model.norm.weight",
)

# name -> (transformers' prefix, what differs from SMALL)
FAMILIES = {
    "llama2": ("Llama", dict(num_key_value_heads=4)),
    "llama3": ("Llama", dict(rope_parameters=THETA | {"rope_theta": 500000.0})),
    "llama3.1": ("Llama", dict(rope_parameters=THETA | LLAMA3)),
    "llama3.2-tied": ("Llama", dict(rope_parameters=THETA | LLAMA3, tie_word_embeddings=True)),
    "llama-mqa-bias": ("Llama", dict(num_key_value_heads=1, attention_bias=True, mlp_bias=True)),
    "llama-head-dim": ("Llama", dict(head_dim=20, num_attention_heads=6, num_key_value_heads=2)),
    "llama-linear": ("Llama", dict(rope_parameters=THETA | {"rope_type": "linear", "factor": 2.0})),
    "llama-dynamic": ("Llama", dict(rope_parameters=THETA | {"rope_type": "dynamic", "factor": 2.0})),
    "llama-yarn": ("Llama", dict(rope_parameters=THETA | YARN)),
    "llama-yarn-mscale": ("Llama", dict(rope_parameters=THETA | YARN | {"mscale": 0.7, "mscale_all_dim": 1.0})),
    "llama-longrope": ("Llama", dict(rope_parameters=THETA | LONGROPE)),
    "mistral": ("Mistral", dict(sliding_window=24)),
    "mistral-full": ("Mistral", dict(sliding_window=None)),
    "qwen2": ("Qwen2", dict(num_attention_heads=6, num_key_value_heads=2)),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=20, max_window_layers=1)),
    "qwen2-yarn": ("Qwen2", dict(rope_parameters=THETA | YARN, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "qwen3-tied": ("Qwen3", dict(head_dim=24, num_key_value_heads=1, tie_word_embeddings=True)),
    "ministral": ("Ministral", dict(head_dim=16, sliding_window=24, layer_types=ALTERNATING)),
    "smollm3": ("SmolLM3", dict(no_rope_layers=[1, 0], attention_bias=True, mlp_bias=True, pad_token_id=0)),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma3": ("Gemma3", GEMMA3),
    "phi3": ("Phi3", dict(sliding_window=40, pad_token_id=0)),
    "phi4-mini": ("Phi3", dict(hidden_size=64, rope_parameters=PARTIAL | PHI_LONGROPE, pad_token_id=0)),
    "olmo2": ("Olmo2", dict(pad_token_id=0)),
    "olmo3": ("Olmo3", dict(sliding_window=24, layer_types=ALTERNATING, rope_parameters=BY_TYPE, pad_token_id=0)),
    "granite": ("Granite", GRANITE),
    "glm4": ("Glm4", dict(head_dim=16, rope_parameters=PARTIAL, pad_token_id=0)),
    "command-r": ("Cohere", dict(use_qk_norm=True, logit_scale=0.5, pad_token_id=0)),
    "command-r7b": ("Cohere2", dict(sliding_window=24, layer_types=ALTERNATING, logit_scale=0.5, pad_token_id=0)),
    "starcoder2": ("Starcoder2", dict(sliding_window=40)),
    "falcon3": ("Llama", dict(head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1000042.0})),
    "exaone4": ("Exaone4", dict(sliding_window=24, layer_types=ALTERNATING)),
    "exaone4-full": ("Exaone4", dict(sliding_window=None, layer_types=["full_attention"] * 2)),
    "mixtral": ("Mixtral", dict(num_local_experts=5, num_experts_per_tok=2)),
    "qwen2-moe": ("Qwen2Moe", EXPERTS | dict(num_experts=6, shared_expert_intermediate_size=36)),
    "qwen3-moe": ("Qwen3Moe", EXPERTS | dict(num_experts=8, head_dim=16, norm_topk_prob=True, mlp_only_layers=[0])),
    "olmoe": ("Olmoe", dict(num_experts=6, num_experts_per_tok=3, pad_token_id=0)),
    "granite-moe": ("GraniteMoe", GRANITE | dict(num_local_experts=4, num_experts_per_tok=2)),
    "deepseek-v2": ("DeepseekV2", LATENT | dict(n_shared_experts=1, q_lora_rank=None, routed_scaling_factor=1.5)),
    "deepseek-v2-groups": ("DeepseekV2", LATENT | GROUPS | dict(topk_method="group_limited_greedy")),
    "deepseek-v3": ("DeepseekV3", LATENT | GROUPS | dict(rope_parameters=THETA | YARN | ALL_DIM)),
    "kimi-k2": ("DeepseekV3", LATENT | dict(n_group=1, topk_group=1, n_shared_experts=1, attention_bias=True)),
    "llama4": ("Llama4", LLAMA4),
    "llama4-two": ("Llama4", LLAMA4 | dict(num_experts_per_tok=2, use_qk_norm=False, attn_temperature_tuning=False)),
    "gpt-oss": ("GptOss", GPT_OSS | dict(num_local_experts=6, num_experts_per_tok=3)),
    "mamba2": ("Mamba2", MAMBA2),
    "granite-4": (
        "GraniteMoeHybrid",
        GRANITE | MAMBA | HYBRID | dict(num_local_experts=0, shared_intermediate_size=90),
    ),
    "granite-4-moe": ("GraniteMoeHybrid", GRANITE | MAMBA | HYBRID | SHARED_MLP | dict(position_embedding_type="rope")),
    "falcon-h1": ("FalconH1", MAMBA | MULTIPLIERS),
    "falcon-h1-norm": ("FalconH1", MAMBA | MULTIPLIERS | dict(mamba_rms_norm=True, mamba_n_groups=2)),
    "nemotron-h": ("NemotronH", NEMOTRON),
    "nemotron-3": ("NemotronH", NEMOTRON_MOE),
    "nemotron-3-latent": ("NemotronH", NEMOTRON_MOE | dict(n_group=1, moe_latent_size=24)),
    "qwen3-next": ("Qwen3Next", QWEN3_NEXT),
    "qwen3.5": ("Qwen3_5", QWEN3_5),
    "qwen3.5-moe": ("Qwen3_5Moe", QWEN3_5 | QWEN3_5_MOE),
    "jamba": ("Jamba", JAMBA),
    "bamba": ("Bamba", MAMBA | dict(mamba_n_groups=2, attn_layer_indices=[1], mamba_conv_bias=False)),
}

# One family for each kind of layer: tests/engine/models/test_families_served.py runs every check on each.
SERVED = ("llama3", "mistral", "qwen2-window", "qwen3", *list(FAMILIES)[list(FAMILIES).index("ministral") :])

# Those of them that differ from another line by a setting alone: left to the long tests.
VARIANTS = ("llama4-two", "nemotron-3-latent")

ONE_OF_EACH_CLASS = {prefix: name for name, (prefix, _) in FAMILIES.items()}.values()


def tiny(vocab_size: int) -> transformers.PreTrainedModel:
    """Return a Llama of two layers of 64, random, with clearly likeliest tokens."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def save_tiny(path: Path, vocab_size: int) -> Path:
    tiny(vocab_size).save_pretrained(path)
    return path


def config_class(prefix: str):
    """Return transformers' config of the models whose classes begin with `prefix`."""
    return getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")


def make_folder(folder: Path, name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes):
    """Save a random model of a family; returns it as transformers has it, for comparison."""
    prefix, differences = FAMILIES[name]
    torch.manual_seed(seed)
    config = config_class(prefix)(**(SMALL | differences | changes))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    randomize(model, prefix)
    model.to(dtype).save_pretrained(folder)
    return model


def make_few_heads(folder: Path, num_layers: int = 1) -> None:
    """Save a random Llama for Triton's interpreter, which runs a program for each token and head of queries, keys and
    values."""
    make_folder(
        folder, "llama3", num_hidden_layers=num_layers, head_dim=16, num_attention_heads=2, num_key_value_heads=1
    )


def randomize(model, prefix: str) -> None:
    """Draw all weights of a model of transformers, whose classes begin with `prefix`."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Wide enough that greedy tokens vary; biases and norms away from the values that hide them.
            std = 0.3 if key.endswith("bias") else 1.5 / parameter.shape[-1] ** 0.5
            parameter.normal_(std=std) if parameter.dim() > 1 or "bias" in key else parameter.uniform_(0.5, 1.5)
            if prefix.startswith(("Qwen3Next", "Qwen3_5")) and key.endswith(DRAWN_SMALLER):
                parameter -= 3 if key.endswith("A_log") else 1
        for key, buffer in model.named_buffers():
            if key.endswith("correction_bias"):
                buffer.uniform_(-0.2, 0.2)


def make_adapter(folder: Path, model, targets, rank: int = 8, alpha: int = 16, seed: int = 0, **options):
    """Save a random adapter of a model of transformers; returns the model that it makes, merged by PEFT."""
    from peft import LoraConfig, get_peft_model  # takes a second

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, init_lora_weights=False, **options)
    adapted = get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.5 / parameter.shape[-1] ** 0.5)
    adapted.save_pretrained(str(folder))
    return adapted.merge_and_unload().eval()


def random_ids(num_tokens: int, seed: int, vocab_size: int = SMALL["vocab_size"]) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (num_tokens,), generator=generator).tolist()
