"""Define what gateways, workers and operators' commands must agree on, beside the .proto files. Plain Python."""

from collections.abc import Mapping
from pathlib import Path

PROTOCOL = 1  # the one version that this build speaks
INSTANCE_BYTES = 16  # of the random name of one start of a process
ROLES = ("prefill", "decode")  # of workers
DEFAULT_TENANT = "default"  # of callers without a credential, so no credential may use this name
HOLDERS = ("quarantined", "fetching", "leased", "running", "cached", "free")  # of KV blocks, strongest first
STAYS_AWAY = 3  # exit status of a worker that was drained to stay away, so that its keeper does not start it again
KEEPER_VARIABLE = "BATON_KEEPER"  # environment variable: names what starts this process again when it ends
RESTARTS, AWAY = "restart", "away"  # what a draining worker tells its keeper to come next, if that is no role
MAX_DRAFT_TOKENS = 16  # proposed tokens of one sequence in one step
UNLIMITED_CONTEXT = 1 << 15  # tokens; for a model without positions (Mamba-2) whose config.json names no limit
MAX_PROMPT_LOGPROBS = 131_072  # per prompt, each token's own and the best ones: 1.5 MB in a message
MAX_INPUTS = 128  # texts of one Embed (2 MiB with 4,096 numbers each), documents of one Score
# Features of a worker. Requests that need one are sent only to workers that have it.
CONSTRAINTS, POOLING, PROMPT_LOGPROBS, ADAPTERS = "constraints", "pooling", "prompt_logprobs", "adapters"
GRANTS_POOLING = "grants_pooling"  # a feature: a prompt that is not answered gets Granted as soon as it is accepted
PREFILL_ON_ADMIT = "prefill_on_admit"  # a feature that saves a round trip; no request needs it
ADAPTER_BYTES = 32  # of the identity of an adapter
# A worker's reasons, by which gateways decide how a request goes on. Why it refuses a request:
KV_FULL = "kv_full"  # it would fit once KV blocks are free
TOO_LONG, NO_ADAPTER = "too_long", "no_adapter"  # this worker can never serve it
ADAPTER_LOADING, ADAPTER_SLOTS = "adapter_loading", "adapter_slots"  # its adapter is not ready; others use all slots
# Why a request ended on a worker:
DRAINING, ATTACHED = "DRAINING", "ATTACHED"  # the worker shuts down; another gateway has taken the request over
ENGINE_FAILED, STEP_FAILED = (
    "ENGINE_FAILED",
    "STEP_FAILED",
)  # alone in a step; with others, any of which may be the cause
KV_TRANSFER_FAILED, LEASE_EXPIRED, TICKET_REFUSED = "KV_TRANSFER_FAILED", "LEASE_EXPIRED", "TICKET_REFUSED"
LAYOUT_MISMATCH, DIGEST_MISMATCH = "LAYOUT_MISMATCH", "DIGEST_MISMATCH"
KV_REASONS = frozenset((KV_TRANSFER_FAILED, LEASE_EXPIRED, TICKET_REFUSED, LAYOUT_MISMATCH, DIGEST_MISMATCH))
# Why a gateway refuses a request, for other code of the gateway:
TENANT_TOKENS = "TENANT_TOKENS"  # its tenant has used up a quota of tokens

MAX_MODEL_NAME = 128  # characters


def adapter_feature(identity: bytes) -> str:
    """Return the feature of a worker that holds this adapter."""
    return f"adapter:{identity.hex()}"


def check_model_name(name: str | None, setting: str) -> None:
    """Raise ValueError, which begins with `setting`, for a name that cannot be used in requests, labels of metrics and
    log lines; None is allowed."""
    if name is not None and (not 0 < len(name) <= MAX_MODEL_NAME or not name.isprintable() or name != name.strip()):
        raise ValueError(f"{setting} {name[:40]!r}: give 1 to {MAX_MODEL_NAME} printable characters")


def named_models(text: str) -> dict[str | None, Path]:
    """Read --model: the folder or file of one model, or NAME=DIR,... for several. The name None stands for a model that
    is named by its folder. Raises ValueError, one line."""
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
    """Return the text that named_models reads as `models`."""
    return ",".join(str(path) if name is None else f"{name}={path}" for name, path in models.items())
