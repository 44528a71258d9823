"""Declare the options of the engine, and resolve their values for one model."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from baton import system
from baton.engine.core.model_spec import ModelSpec
from baton.options import option
from baton.protocol import MAX_DRAFT_TOKENS, check_model_name
from kvtransfer.layout import KV_FORMS, KVLayout
from kvtransfer.naming import SPAN_TOKENS

DTYPES = ("auto", "bf16", "fp16", "fp32")
KV_DTYPES = ("auto", *KV_FORMS, "fp8")  # fp8 is fp8_e4m3
# The same as in weights/formats/registry.py, which needs torch.
QUANTIZATIONS = ("auto", "none", "int8", "int8-weight-only", "fp8", "int4-g32", "int4-g64", "int4-g128")
DEVICES = ("auto", "cpu", "cuda")
MIN_CAPABILITY = (8, 0)  # of a GPU: bf16 products
SPECULATORS = ("off", "auto", "draft", "ngram", "suffix", "medusa", "eagle", "mtp")
DEGREES = (1, 2, 4, 8)  # of tensor_parallel
ALL_REDUCES = ("exact", "fast")
MAX_NUMBER = (1 << 31) - 1  # of any setting: kernels and messages use 32 bits for most
MAX_BLOCK_SIZE = 1 << 16  # the largest that messages of KV transfer can name
MAX_POOL_BYTES = 4 << 30
# The pool's share of the memory if num_blocks is not given: two workers and their weights fit. More than two workers
# divide what two would have.
POOL_SHARE = 0.125


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of an engine; workers take them as flags. Raises ValueError, one line that begins with the field."""

    model: Path = option("model folder (config.json, safetensors, tokenizer.json) or .gguf file", metavar="DIR|FILE")
    served_model_name: str | None = option(
        "name of the model for clients, metrics and traces (default: its folder's or file's)", None, metavar="NAME"
    )
    # auto: the checkpoint's, or cpu.compute_dtype. A checkpoint may be fp16, which is asked for here alone.
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
    # None: max_num_seqs whole contexts, within a share of the memory
    num_blocks: int | None = option(
        "KV blocks in the pool (default: enough for the largest batch, within an eighth of the memory, of the host or the "
        "container, and 4 GiB; on a GPU what is left of its share)",
        None,
    )
    workers_per_host: int = option(
        "workers on CPUs that share the memory: by default the KV of more than two takes as much as that of two", 1
    )
    # None: two for each sequence, within a share of the memory
    num_states: int | None = option(
        "of models whose layers keep a state: blocks for states of sequences and for checkpoints, which stand for cached "
        "prefixes (default: twice max_num_seqs, within as much memory as KV may take)",
        None,
    )
    checkpoint_tokens: int = option(
        "of models whose layers keep a state: tokens from one checkpoint of a sequence to the next, whole spans of 64, "
        "rounded up to whole blocks; "
        "another stands at the end of its prompt",
        512,
    )
    max_num_seqs: int = option("sequences that run at the same time; a decode worker on a GPU: 256", 64)
    max_model_len: int | None = option("longest sequence in tokens (default: the model's context)", None)
    max_num_batched_tokens: int = option(
        "tokens computed in one step, which is also the size of a prefill chunk; on a GPU 8192 for a prefill worker, 2048 "
        "for a decode worker",
        512,
    )
    attention: str = option("attention kernel; auto: the best that fits", "auto", metavar="auto|native|triton|...")
    linear: str = option("kernel for linear layers; auto: the best that fits", "auto", metavar="auto|fbgemm|dense|fast")
    threads: int | None = option(
        "CPU threads; auto: a part of the cores, which the workers of one host divide, and for prompts those that others leave idle (default: auto)",
        None,
        metavar="auto|N",
    )
    tensor_parallel: int = option(
        "processes that share each layer of the model, 1, 2, 4 or 8, with --threads or a GPU each", 1, metavar="N"
    )
    pipeline_parallel: int = option(
        "stages that have some layers of the model each, of as many processes as --tensor-parallel says; on GPUs of one",
        1,
        metavar="M",
    )
    remote_stages: int = option(
        "of --pipeline-parallel the last ones, whose processes join from other hosts", 0, metavar="K"
    )
    expert_parallel: bool = option(
        "with --tensor-parallel: each process has some experts of a mixture whole, in place of a part of each", False
    )
    all_reduce: str = option(
        "with --tensor-parallel: exact gives the bits of one process, fast rounds what each process adds and is a numerics "
        "class of its own",
        "exact",
        choices=ALL_REDUCES,
    )
    batch_invariant: bool = option("make results independent of the other requests in a batch", True)
    speculator: str = option(
        "speculative decoding; auto: prompt lookup and, if given, --draft-model, whenever it is faster; suffix: lookup in the "
        "prompt and in the tenant's earlier answers; mtp: by the layer that the checkpoint ships",
        "off",
        choices=SPECULATORS,
    )
    draft_model: Path | None = option("folder of a draft model or of trained heads", None, metavar="DIR")
    num_draft_tokens: int | None = option(
        f"tokens proposed per step, at most {MAX_DRAFT_TOKENS} (default: chosen by measured gain)", None
    )
    adapter: tuple[str, ...] = option(
        "LoRA adapters that requests may name beside the model, folders as PEFT writes them", (), metavar="NAME=DIR,..."
    )
    adapter_slots: int | None = option(
        "adapters that are ready to be applied at once; others wait as they were read (default: all are ready)", None
    )
    adapter_root: Path | None = option(
        "folder below which operators may load adapters while the worker runs; what they load is noted there, for workers "
        "that start later (default: none may be)",
        None,
        metavar="DIR",
    )
    device: str = option("device to compute on; auto: a GPU if there is one", "auto", choices=DEVICES)
    # None: device.UTILIZATION
    gpu_memory_utilization: float | None = option("fraction of GPU memory for weights and KV; needs a GPU", None)
    workers_per_gpu: int = option("workers that share the GPU: each takes so small a part of its memory by default", 1)
    # where the kernels allow it
    cuda_graphs: bool = option("run decode steps and short chunks as CUDA graphs on a GPU", True)
    sm_share: float | None = option(
        "fraction of the GPU's multiprocessors for this worker (default: all); needs a GPU", None
    )

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_sizes()
        self._check_device()
        check_model_name(self.served_model_name, "served_model_name")
        self._check_speculation()
        self._check_ranks()
        self._check_adapters()
        # Decoding goes first: what is left must always hold one span, or prompts would never be read.
        least = self.max_num_seqs + SPAN_TOKENS
        if (given := self.max_num_batched_tokens) < least:
            raise ValueError(f"max_num_batched_tokens {given}: must be at least max_num_seqs + {SPAN_TOKENS} = {least}")

    def _check_choices(self) -> None:
        for name, known in (("dtype", DTYPES), ("kv_dtype", KV_DTYPES), ("quantization", QUANTIZATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r}: one of {', '.join(known)}")

    def _check_sizes(self) -> None:
        for each in fields(self):
            if isinstance(value := getattr(self, each.name), int) and value > MAX_NUMBER:
                raise ValueError(f"{each.name} {value}: must be at most {MAX_NUMBER}")
        if self.block_size < 1 or (SPAN_TOKENS % self.block_size and self.block_size % SPAN_TOKENS):
            raise ValueError(f"block_size {self.block_size}: must divide {SPAN_TOKENS} or be a multiple of it")
        if self.block_size > MAX_BLOCK_SIZE:
            raise ValueError(f"block_size {self.block_size}: must be at most {MAX_BLOCK_SIZE}")
        if self.checkpoint_tokens < 1 or self.checkpoint_tokens % SPAN_TOKENS:
            raise ValueError(f"checkpoint_tokens {self.checkpoint_tokens}: must be a multiple of {SPAN_TOKENS}")
        if self.num_states is not None and self.num_states < 2:
            raise ValueError(f"num_states {self.num_states}: must be at least 2, a sequence's and a checkpoint")
        for name in ("num_blocks", "max_num_seqs", "max_model_len", "threads", "workers_per_gpu", "workers_per_host"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} {value}: must be at least 1")
        if self.max_model_len == 1:
            raise ValueError("max_model_len 1: must be at least 2, a token to read and one to answer")
        if self.num_blocks == self.block_size == 1:
            raise ValueError("num_blocks 1: with block_size 1 at least 2, a token to read and one to answer")

    def _check_device(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(f"device {self.device!r}: one of {', '.join(DEVICES)}")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization {share:g}: must be above 0 and at most 1")
        if share is not None and self.device == "cpu":
            raise ValueError("gpu_memory_utilization has no effect on a CPU; size the pool with num_blocks")
        if self.sm_share is not None and not 0 < self.sm_share < 1:
            raise ValueError(f"sm_share {self.sm_share:g}: must be above 0 and below 1")
        if self.sm_share is not None and self.device == "cpu":
            raise ValueError("sm_share has no effect on a CPU; give threads")

    def _check_adapters(self) -> None:
        _ = self.adapter_folders  # checks them
        if self.adapter_slots is not None and self.adapter_slots < 1:
            raise ValueError(f"adapter_slots {self.adapter_slots}: must be at least 1")
        if self.adapter_slots is not None and not self.may_adapt:
            raise ValueError("adapter_slots has no effect without adapter or adapter_root")

    @property
    def checkpoint_step(self) -> int:
        """The tokens from one checkpoint to the next, whole blocks: no prefix ends inside a block."""
        return -(-self.checkpoint_tokens // self.block_size) * self.block_size

    @property
    def may_adapt(self) -> bool:
        """Whether requests may name adapters, now or once one is loaded."""
        return bool(self.adapter) or self.adapter_root is not None

    @property
    def adapter_folders(self) -> dict[str, Path]:
        """The folders of adapters by name. Raises ValueError for an entry that is not NAME=DIR or a name given
        twice."""
        found: dict[str, Path] = {}
        for given in self.adapter:
            name, _, folder = given.partition("=")
            check_model_name(name, f"adapter {given!r}: the name")
            if not folder:
                raise ValueError(f"adapter {given!r}: give NAME=DIR")
            if name in found:
                raise ValueError(f"adapter {name}: is given twice")
            found[name] = Path(folder)
        return found

    def _check_speculation(self) -> None:
        if self.speculator not in SPECULATORS:
            raise ValueError(f"speculator {self.speculator!r}: one of {', '.join(SPECULATORS)}")
        needs_model = self.speculator not in ("off", "auto", "ngram", "suffix", "mtp")
        if needs_model and self.draft_model is None:
            raise ValueError(f"speculator {self.speculator}: give its folder with draft_model")
        if self.draft_model is not None and self.speculator in ("off", "ngram", "suffix", "mtp"):
            raise ValueError(f"draft_model has no effect with speculator {self.speculator}; leave it out")
        if self.num_draft_tokens is not None:
            if self.speculator == "off":
                raise ValueError("num_draft_tokens has no effect without speculator; leave it out")
            if not 1 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS:
                raise ValueError(f"num_draft_tokens {self.num_draft_tokens}: must be 1 to {MAX_DRAFT_TOKENS}")

    def _check_ranks(self) -> None:
        if self.tensor_parallel not in DEGREES:
            raise ValueError(f"tensor_parallel {self.tensor_parallel}: one of {', '.join(map(str, DEGREES))}")
        if self.pipeline_parallel < 1:
            raise ValueError(f"pipeline_parallel {self.pipeline_parallel}: must be at least 1")
        if not 0 <= self.remote_stages < self.pipeline_parallel:
            allowed = f"with pipeline_parallel {self.pipeline_parallel} 0 to {self.pipeline_parallel - 1}"
            raise ValueError(f"remote_stages {self.remote_stages}: {allowed}: the first stage is the worker itself")
        if self.all_reduce not in ALL_REDUCES:
            raise ValueError(f"all_reduce {self.all_reduce!r}: one of {', '.join(ALL_REDUCES)}")
        if self.tensor_parallel == 1 and self.all_reduce != "exact":
            raise ValueError("all_reduce has no effect without tensor_parallel; leave it out")
        if self.tensor_parallel == 1 and self.expert_parallel:
            raise ValueError("expert_parallel has no effect without tensor_parallel; leave it out")
        if self.remote_stages and self.tensor_parallel > 1:
            raise ValueError("remote_stages: a stage of another host has one rank; leave tensor_parallel at 1")

    @property
    def num_ranks(self) -> int:
        """The number of processes of the engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def num_rows(self) -> int:
        """The rows of the steps that all stages compute at a time."""
        return self.max_num_batched_tokens * self.pipeline_parallel

    @property
    def num_ranks_here(self) -> int:
        """The number of the engine's processes on this host."""
        return self.num_ranks - self.remote_stages


def resolve_dtypes(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Return the config with `auto` and `fp8` replaced by the dtypes that they mean for this model."""
    dtype = spec.dtype if config.dtype == "auto" else config.dtype
    kv_dtype = {"auto": dtype, "fp8": "fp8_e4m3"}.get(config.kv_dtype, config.kv_dtype)
    return replace(config, dtype=dtype, kv_dtype=kv_dtype)


def resolve(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Return the config with every default filled in for this model. Raises ValueError if they do not fit."""
    config = resolve_dtypes(config, spec)
    max_model_len = config.max_model_len or spec.context
    if max_model_len > spec.longest_context:
        raise ValueError(f"max_model_len {max_model_len}: the model's context is {spec.longest_context}")
    layout = spec.kv_layout(config.kv_dtype, config.block_size)
    num_blocks = config.num_blocks or default_num_blocks(layout, config, max_model_len)
    if num_blocks * config.block_size < max_model_len:
        if config.max_model_len is not None:
            needed = layout.num_blocks(max_model_len)
            raise ValueError(f"num_blocks {num_blocks}: one context of {max_model_len} needs {needed}")
        max_model_len = num_blocks * config.block_size  # a request that fits alone can always continue
    return replace(config, max_model_len=max_model_len, num_blocks=num_blocks, num_states=_num_states(config, layout))


def _num_states(config: EngineConfig, layout: KVLayout) -> int | None:
    """Return the number of state blocks: as given, or two for each sequence within the pool's memory budget.

    Raises ValueError if a number is given that would have no effect.
    """
    if layout.state is None:
        if config.num_states is not None:
            raise ValueError(f"num_states {config.num_states}: no layer of this model keeps a state; leave it out")
        return None
    return config.num_states or max(2, min(2 * config.max_num_seqs, _pool_budget(config) // layout.state_bytes))


def default_num_blocks(layout: KVLayout, config: EngineConfig, max_model_len: int) -> int:
    """Return enough blocks for a whole context of every sequence, or as many as the memory budget holds."""
    most = config.max_num_seqs * layout.num_blocks(max_model_len)
    if not layout.block_bytes:  # no layer has KV: blocks are names
        return most
    return max(1, min(most, _pool_budget(config) // layout.block_bytes))


def _pool_budget(config: EngineConfig) -> int:
    share = POOL_SHARE * min(1, 2 / config.workers_per_host)
    return min(int(system.memory_limit() * share), MAX_POOL_BYTES)
