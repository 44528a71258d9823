"""Define what gateways, workers and operators' commands must agree on, beside the .proto files. Plain Python."""

from collections.abc import Mapping
from pathlib import Path

PROTOCOL = 1  # the one version that this build speaks
INSTANCE_BYTES = 16  # of the random name that a process has for one start
ROLES = ("prefill", "decode")  # of workers
DEFAULT_TENANT = "default"  # callers without a credential; so no credential may name it
HOLDERS = ("quarantined", "fetching", "leased", "running", "cached", "free")  # of KV blocks, strongest first
STAYS_AWAY = 3  # exit status of a worker that was drained to stay away: what keeps it running leaves it ended
KEEPER_VARIABLE = "BATON_KEEPER"  # names, in a process's environment, what starts it again when it ends
MAX_DRAFT_TOKENS = 16  # proposals that a sequence may have in one step
UNLIMITED_CONTEXT = 1 << 15  # tokens, of a model without positions (Mamba-2), whose config.json says nothing of it
MAX_PROMPT_LOGPROBS = 131_072  # of one prompt, each token's own and the best: 1.5 MB in a message
MAX_INPUTS = 128  # texts of one Embed, at 4,096 numbers each 2 MiB; documents of one Score
# Features of a worker, without which some requests are not sent to it.
CONSTRAINTS, POOLING, PROMPT_LOGPROBS, ADAPTERS = "constraints", "pooling", "prompt_logprobs", "adapters"
GRANTS_POOLING = "grants_pooling"  # a feature: of a prompt that is not answered Granted comes at once
PREFILL_ON_ADMIT = "prefill_on_admit"  # a feature that saves a way there and back; no request lacks it
ADAPTER_BYTES = 32  # of the identity of an adapter
# Reasons of a worker, by which gateways decide how a request goes on. Why it refuses one:
KV_FULL = "kv_full"  # it would fit once KV blocks are free
TOO_LONG, NO_ADAPTER = "too_long", "no_adapter"  # it can never be taken there
ADAPTER_LOADING, ADAPTER_SLOTS = "adapter_loading", "adapter_slots"  # its adapter is not ready; others use all slots
# Why one ended there:
DRAINING, ATTACHED = "DRAINING", "ATTACHED"  # the worker goes; another gateway has taken it over
ENGINE_FAILED, STEP_FAILED = "ENGINE_FAILED", "STEP_FAILED"  # alone in a step; beside others, who may be to blame
KV_TRANSFER_FAILED, LEASE_EXPIRED, TICKET_REFUSED = "KV_TRANSFER_FAILED", "LEASE_EXPIRED", "TICKET_REFUSED"
LAYOUT_MISMATCH, DIGEST_MISMATCH = "LAYOUT_MISMATCH", "DIGEST_MISMATCH"
KV_REASONS = frozenset((KV_TRANSFER_FAILED, LEASE_EXPIRED, TICKET_REFUSED, LAYOUT_MISMATCH, DIGEST_MISMATCH))
# Why a gateway refuses one, which it reads again itself:
TENANT_TOKENS = "TENANT_TOKENS"  # its tenant has used up a quota of tokens

MAX_MODEL_NAME = 128  # characters


def adapter_feature(identity: bytes) -> str:
    """Return the feature of a worker that holds an adapter."""
    return f"adapter:{identity.hex()}"


def check_model_name(name: str | None, setting: str) -> None:
    """Raise ValueError, which begins with `setting`, for a name that cannot stand in requests, labels of metrics and
    log lines; None is no name."""
    if name is not None and (not 0 < len(name) <= MAX_MODEL_NAME or not name.isprintable() or name != name.strip()):
        raise ValueError(f"{setting} {name[:40]!r}: give 1 to {MAX_MODEL_NAME} printable characters")


def named_models(text: str) -> dict[str | None, Path]:
    """Read --model: the folder or file of one model, or NAME=DIR,... of several. None is the name of one that has its
    folder's. Raises ValueError, one line."""
    if "=" not in text or "://" in text.partition("=")[0] or Path(text).exists():
        return {None: Path(text)}
    found: dict[str | None, Path] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, is_named, path = (each.strip() for each in part.partition("="))
        if not is_named or not path:
            raise ValueError(f"--model {part!r}: give NAME=DIR for each of several models")
        check_model_name(name, f"--model {part!r}: the name")
        if name in found:
            raise ValueError(f"--model {name}: is given twice")
        found[name] = Path(path)
    return found


def model_setting(models: Mapping[str | None, Path]) -> str:
    """Write what named_models reads."""
    return ",".join(str(path) if name is None else f"{name}={path}" for name, path in models.items())
