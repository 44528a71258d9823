"""Settings of a worker, the same for both roles; a role brings its own defaults. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from baton.service.settings import option


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker process is told. Raises ValueError, one line, for what cannot have an effect."""

    model: Path = option("model folder (config.json, safetensors, tokenizer.json)", metavar="DIR")
    listen: str = option("address of the gRPC server; port 0: the system chooses", "127.0.0.1:0", metavar="HOST:PORT")
    dtype: str = option("compute dtype; auto: the checkpoint's", "auto", choices=("auto", "bf16", "fp32"))
    kv_dtype: str = option("stored form of KV; auto: the compute dtype", "auto", metavar="auto|bf16|fp32|fp16")
    quantization: str = option("weight form", "none", metavar="none")
    block_size: int = option("tokens per KV block; divides 64 or is a multiple of it", 32)
    num_blocks: int | None = option("KV blocks in the pool (default: sized by the largest batch)", None)
    max_num_seqs: int = option("sequences that run at once", 64)
    max_model_len: int | None = option("longest sequence in tokens (default: the model's context)", None)
    max_num_batched_tokens: int = option("tokens of one step, and so of one prefill chunk", 512)
    attention: str = option("attention kernel; auto: the best that fits", "auto", metavar="auto|reference|sdpa")
    linear: str = option("kernel of linear layers; auto: the best that fits", "auto", metavar="auto|dense|fast")
    transports: tuple[str, ...] = option("KV transports", ("shm", "tcp"), choices=("shm", "tcp"), metavar="shm,tcp")
    lease_ttl_s: float = option("how long KV waits for its taker without a word from anyone", 5.0)
    drain_grace_s: float = option("what still runs so long after SIGTERM is ended", 8.0)
    log_level: str = option("least severe line in the log", "info", choices=("debug", "info", "warning", "error"))
    threads: int | None = option("CPU threads (default: torch's choice)", None)
    batch_invariant: bool = option("results do not depend on what shares a batch", True)
    speculator: str = option("speculative decoding", "off", metavar="off")
    draft_model: Path | None = option("folder of a draft model; needs a speculator", None, metavar="DIR")
    num_draft_tokens: int | None = option("tokens drafted per step; needs a speculator", None)
    gpu_memory_utilization: float | None = option("share of GPU memory for weights and KV; needs a GPU", None)

    def __post_init__(self) -> None:
        self._refuse_what_has_no_effect()
        if 64 % self.block_size if 0 < self.block_size < 64 else self.block_size <= 0 or self.block_size % 64:
            raise ValueError(f"--block-size {self.block_size}: must divide 64 or be a multiple of it")
        for name in ("num_blocks", "max_num_seqs", "max_model_len", "max_num_batched_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        for name in ("lease_ttl_s", "drain_grace_s"):
            if not 0 < getattr(self, name) < 3600:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be above 0 and below 3600")
        if not self.transports:
            raise ValueError("--transports is empty: give shm, tcp or both")

    def _refuse_what_has_no_effect(self) -> None:
        if self.quantization != "none":
            raise ValueError(f"--quantization {self.quantization}: this version runs unquantized weights only")
        if self.kv_dtype not in ("auto", "bf16", "fp32", "fp16"):
            raise ValueError(f"--kv-dtype {self.kv_dtype}: this version stores auto, bf16, fp32 or fp16")
        if self.speculator != "off":
            raise ValueError(f"--speculator {self.speculator}: this version does not speculate; leave it out")
        if self.draft_model is not None:
            raise ValueError("--draft-model has no effect without a speculator; leave it out")
        if self.num_draft_tokens is not None:
            raise ValueError("--num-draft-tokens has no effect without a speculator; leave it out")
        if self.gpu_memory_utilization is not None:
            raise ValueError("--gpu-memory-utilization has no effect on a CPU; size the pool with --num-blocks")
