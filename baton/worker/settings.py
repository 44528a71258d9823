"""Settings of a worker, the same for both roles; a role brings its own defaults. Imports no torch."""

import re
from dataclasses import dataclass
from pathlib import Path

from baton.engine.core.config import DEVICES, KV_DTYPES, MAX_DRAFT_TOKENS, QUANTIZATIONS, SPECULATORS
from baton.service.security.exposure import Exposure, is_loopback
from baton.service.settings import option
from kvtransfer.memory.cuda_runtime import find_runtime

TRANSPORTS = ("auto", "cuda_ipc", "shm", "nixl", "tcp", "grpc")
IN_PLAIN_TEXT = ("nixl", "tcp")  # of these, those that reach other machines, and that TLS does not cover
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]+")


@dataclass(frozen=True)
class WorkerSettings(Exposure):
    """What a worker process is told. Raises ValueError, one line, for what cannot have an effect."""

    model: Path = option("model folder (config.json, safetensors, tokenizer.json) or .gguf file", metavar="DIR|FILE")
    listen: str = option("address of the gRPC server; port 0: the system chooses", "127.0.0.1:0", metavar="HOST:PORT")
    admin: str = option("address of /healthz, /readyz and /metrics", "127.0.0.1:0", metavar="HOST:PORT")
    dtype: str = option(
        "compute dtype; auto: the checkpoint's, or what is fast", "auto", choices=("auto", "bf16", "fp32")
    )
    kv_dtype: str = option("format in which KV is stored; auto: the compute dtype", "auto", choices=KV_DTYPES)
    quantization: str = option(
        "weight format; auto: the model's own; other values quantize an unquantized model at load time",
        "auto",
        choices=QUANTIZATIONS,
    )
    block_size: int = option("tokens per KV block; divides 64 or is a multiple of it", 32)
    num_blocks: int | None = option("KV blocks in the pool (default: enough for the largest batch)", None)
    max_num_seqs: int = option("sequences that run at the same time", 64)
    max_model_len: int | None = option("longest sequence in tokens (default: the model's context)", None)
    max_num_batched_tokens: int = option("tokens computed in one step, which is also the size of a prefill chunk", 512)
    attention: str = option("attention kernel; auto: the best that fits", "auto", metavar="auto|native|triton|...")
    linear: str = option("kernel for linear layers; auto: the best that fits", "auto", metavar="auto|dense|fast")
    transports: tuple[str, ...] = option(
        "transports for KV; auto: all that work on this machine",
        ("auto",),
        choices=TRANSPORTS,
        metavar="auto|shm,tcp,...",
    )
    kv_socket_dir: Path | None = option(
        "folder of the sockets by which workers on this host share memory; containers need a common volume "
        "(default: the folder for temporary files)", None, metavar="DIR"
    )  # fmt: skip
    advertise_host: str | None = option(
        "host name or address at which other machines reach this worker (default: the host of --listen)",
        None,
        metavar="HOST",
    )
    gateways: tuple[str, ...] = option(
        "gateways to register with; one is enough if they share a Redis", (), metavar="HOST:PORT,..."
    )
    strict_numerics: bool = option("exchange KV only with workers of the same numerics class", False)
    kv_digest: str = option(
        "digest that verifies received KV; use sha256 on a network without TLS where others could alter data", "sum",
        choices=("sum", "sha256"),
    )  # fmt: skip
    insecure_kv: bool = option(
        "allow KV to travel unencrypted over tcp and nixl beyond loopback although TLS is configured", False
    )
    lease_ttl_s: float = option("seconds that KV waits for a worker to fetch it before its blocks are freed", 5.0)
    drain_grace_s: float = option("seconds after SIGTERM until requests that still run move to other workers", 8.0)
    resume_window_s: float = option("seconds that a sequence can be resumed after its gateway is lost", 30.0)
    log_level: str = option("lowest level that is logged", "info", choices=("debug", "info", "warning", "error"))
    threads: int | None = option(
        "CPU threads; auto: all cores, which `baton up` divides among its workers (default: auto)",
        None,
        metavar="auto|N",
    )
    batch_invariant: bool = option("make results independent of the other requests in a batch", True)
    speculator: str = option(
        "speculative decoding; auto: prompt lookup and, if given, --draft-model, whenever it is faster",
        "off",
        choices=SPECULATORS,
    )
    draft_model: Path | None = option("folder of a draft model or of trained heads", None, metavar="DIR")
    num_draft_tokens: int | None = option(
        f"tokens proposed per step, at most {MAX_DRAFT_TOKENS} (default: chosen by measured gain)", None
    )
    device: str = option("device to compute on; auto: a GPU if there is one", "auto", choices=DEVICES)
    gpu_memory_utilization: float | None = option("fraction of GPU memory for weights and KV; needs a GPU", None)
    cuda_graphs: bool = option("run decode steps as CUDA graphs on a GPU", True)
    sm_share: float | None = option(
        "fraction of the GPU's multiprocessors for this worker (default: all); needs a GPU", None
    )

    def __post_init__(self) -> None:
        self._refuse_what_has_no_effect()
        if 64 % self.block_size if 0 < self.block_size < 64 else self.block_size <= 0 or self.block_size % 64:
            raise ValueError(f"--block-size {self.block_size}: must divide 64 or be a multiple of it")
        for name in ("num_blocks", "max_num_seqs", "max_model_len", "max_num_batched_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        for name in ("lease_ttl_s", "drain_grace_s", "resume_window_s"):
            if not 0 < getattr(self, name) < 3600:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be above 0 and below 3600")
        self._check_speculation()
        if not self.transports:
            raise ValueError("--transports is empty: give auto, or some of " + ", ".join(TRANSPORTS[1:]))
        self._check_address()
        self.check_exposure(self.tls is not None, "--tls-cert, --tls-key and --tls-ca")
        if named := [name for name in self.transports if name in IN_PLAIN_TEXT and not self._may_be_plain]:
            raise ValueError(
                f"--transports {named[0]}: is in plain text, and --listen {self.listen} is beyond loopback; "
                "give grpc, which has TLS, or say --insecure-kv"
            )

    @property
    def _may_be_plain(self) -> bool:
        return self.tls is None or self.insecure_kv or is_loopback(self.listen)

    @property
    def refused_transports(self) -> tuple[str, ...]:
        """What `auto` must not mean here."""
        return () if self._may_be_plain else IN_PLAIN_TEXT

    def _check_address(self) -> None:
        """Where takers find the KV of this worker."""
        if self.kv_socket_dir is not None and not self.kv_socket_dir.is_dir():
            raise ValueError(f"--kv-socket-dir {self.kv_socket_dir}: no such folder")
        host = self.advertise_host
        if host is not None and (not _HOST.fullmatch(host) or host in ("0.0.0.0", "::")):
            raise ValueError(f"--advertise-host {host}: give a host name or an IP address, without a port")
        is_everywhere = self.listen.rpartition(":")[0].strip("[]") in ("0.0.0.0", "::")
        if self.gateways and is_everywhere and host is None:
            raise ValueError(f"--gateways: with --listen {self.listen} say by --advertise-host where this worker is")

    def _check_speculation(self) -> None:
        if self.draft_model is None and self.speculator not in ("off", "auto", "ngram"):
            raise ValueError(f"--speculator {self.speculator}: give its folder with --draft-model")
        if self.num_draft_tokens is not None and not 1 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"--num-draft-tokens {self.num_draft_tokens}: must be 1 to {MAX_DRAFT_TOKENS}")

    def _refuse_what_has_no_effect(self) -> None:
        if self.draft_model is not None and self.speculator in ("off", "ngram"):
            raise ValueError(f"--draft-model has no effect with --speculator {self.speculator}; leave it out")
        if self.num_draft_tokens is not None and self.speculator == "off":
            raise ValueError("--num-draft-tokens has no effect without --speculator; leave it out")
        if self.device == "cuda" and find_runtime() is None:
            raise ValueError("--device cuda: there is no CUDA device here; leave it at auto, or give cpu")
        if "cuda_ipc" in self.transports and (self.device == "cpu" or find_runtime() is None):
            raise ValueError("--transports cuda_ipc: KV lies on no GPU here; leave it at auto, or give shm or tcp")
        if self.sm_share is not None and not 0 < self.sm_share < 1:
            raise ValueError(f"--sm-share {self.sm_share:g}: must be above 0 and below 1")
        if not self.cuda_graphs and (self.device == "cpu" or find_runtime() is None):
            raise ValueError("--no-cuda-graphs has no effect on a CPU; leave it out")
        if self.sm_share is not None and (self.device == "cpu" or find_runtime() is None):
            raise ValueError("--sm-share has no effect on a CPU; give --threads")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"--gpu-memory-utilization {share:g}: must be above 0 and at most 1")
        if share is not None and (self.device == "cpu" or find_runtime() is None):
            raise ValueError("--gpu-memory-utilization has no effect on a CPU; size the pool with --num-blocks")
