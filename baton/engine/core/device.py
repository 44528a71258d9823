"""Find the device that an engine computes on, and decide how much of its memory and its multiprocessors it gets."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton import system
from baton.engine import native
from baton.engine.core import cpu
from baton.engine.core.config import DEVICES, MIN_CAPABILITY, POOL_SHARE, EngineConfig
from baton.lines import one_line

UTILIZATION = 0.9  # default share of GPU memory: graphs, libraries and fragmentation take from the rest
GIB = 1 << 30
CONTEXT_BYTES = GIB  # what CUDA and its libraries take outside torch's allocator; an estimate, not measured
QUIET_S, POLL_S = 2.0, 0.25
# The size of weights quantized at load time, relative to bf16, and the quantizations that errors advise.
SMALLER = {
    "fp8": 0.53, "int8": 0.53, "int8-weight-only": 0.53, "int4-g32": 0.4, "int4-g64": 0.34, "int4-g128": 0.31,
}  # fmt: skip
MAX_THREADS_A_CORE = 16
PROCESS_BYTES = 200 << 20  # of each process of a worker on a CPU, beside weights and KV: seen with the demo model
ADVISED = ("fp8", "int8", "int4-g128")

SM_MULTIPLE = 8  # a context has a multiple of this many multiprocessors, on Hopper

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one GPU, in bytes.

    `free`: available to any process, after this process has emptied its cache. `ours`: used by this process alone.
    """

    total: int
    free: int
    ours: int

    @classmethod
    def of(cls, device: torch.device) -> "Memory":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device) + CONTEXT_BYTES)


def wait_for_memory(read: Callable[[], Memory], share: float, pause: Callable[[float], None] = time.sleep) -> None:
    """Wait while the driver takes back the memory of a process that has just ended, perhaps this one's former program.

    Returns when `share` of the GPU is free, or the free memory has not grown for QUIET_S.
    """
    memory, quiet_s = read(), 0.0
    most = memory.free
    while most < share * memory.total and quiet_s < QUIET_S:
        pause(POLL_S)
        free = read().free
        quiet_s = 0.0 if free > most + memory.total // 100 else quiet_s + POLL_S
        most = max(most, free)


def memory_share(config: EngineConfig) -> float:
    """Return the share of a GPU's memory that the engine may use, weights included."""
    given = config.gpu_memory_utilization
    return UTILIZATION / config.workers_per_gpu if given is None else given


def find_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is a GPU if there is a usable one. Raises ValueError, one line."""
    if name not in DEVICES:
        raise ValueError(f"device {name!r}: one of {', '.join(DEVICES)}")
    if name == "cpu":
        return torch.device("cpu")
    refusal = unfit()
    if not refusal:
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda":
        raise ValueError(f"device cuda: {refusal}; leave it at auto, or give cpu")
    return torch.device("cpu")


def unfit() -> str:
    """Return why this process cannot compute on a GPU, or "" if it can."""
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return f"torch {torch.__version__} ({built}) sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        found, needed = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
        return f"{torch.cuda.get_device_name()} has compute capability {found}, at least {needed} is needed"
    return ""


def set_threads(num_threads: int | None) -> None:
    """Set the number of CPU threads that torch computes with. None: OMP_NUM_THREADS, or at most the number of cores.

    Raises ValueError for more than MAX_THREADS_A_CORE a core: these would only wait for each other.
    """
    if num_threads is not None:
        num_cores = system.num_cores()
        if num_threads > (most := MAX_THREADS_A_CORE * num_cores):
            bound = f"{MAX_THREADS_A_CORE} times the cores of this process, {num_cores}"
            raise ValueError(f"threads {num_threads}: must be at most {most}, {bound}")
        torch.set_num_threads(num_threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), system.num_cores()))


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host tensor on the device, without waiting for it.

    A copy from pageable memory would wait for all launches before it. torch does not reuse the pinned memory before the
    copy has passed.
    """
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def is_lost(device: torch.device) -> bool:
    """Return whether the GPU fails every further call of this process.

    Errors of a kernel or of the hardware persist (an illegal access, an Xid, ECC), those of a single call do not.
    """
    if device.type == "cpu":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def product_dtype() -> torch.dtype:
    """Return the dtype in which torch multiplies matrices fastest here: bf16 if the processor has instructions for it.

    Without them torch emulates bf16: with AVX2, 512 by 512 by 512 ran at 8 GFLOP/s (fp32: 62), and a training step took
    20 times as long.
    """
    return torch.bfloat16 if cpu.multiplies_bf16() else torch.float32


def instruction_set(device: torch.device) -> str:
    """Return the instruction set that kernels are compiled for, since each adds in an order of its own.

    For a CPU that is torch's, and how the native kernels multiply.
    """
    if device.type == "cpu":
        library = native.library()
        of_torch = torch.backends.cpu.get_cpu_capability().lower()
        return of_torch if library is None else f"{of_torch}+{library.products}"
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or the processor's name and instruction set."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu.name()}, {instruction_set(device)}"


def names_gpu(words: str) -> bool:
    """Return whether a result of `device_name` names a GPU."""
    return ", " not in words


def check_weights(num_bytes: int, memory: Memory, utilization: float, quantization: str) -> None:
    """Raise ValueError if weights leave nothing of the GPU's share, naming quantizations that would fit.

    `num_bytes`: of the weights as the files have them, floats in the dtype of computing. `quantization`: none, one at
    load time (a key of SMALLER), or auto for files that are quantized already.
    """
    share = int(memory.total * utilization)
    room = min(memory.free, share)
    taken = int(num_bytes * SMALLER.get(quantization, 1))
    if taken < room:
        return
    fitting = [name for name in ADVISED if num_bytes * SMALLER[name] < room and quantization == "none"]
    advice = f"quantization {' or '.join(fitting)} would fit" if fitting else "a smaller model is needed"
    raise ValueError(
        f"the model's weights take {taken / GIB:.1f} GiB, the GPU has {memory.free / GIB:.1f} GiB free of "
        f"{memory.total / GIB:.1f} and {utilization:g} of it may be used; {advice}"
    )


def check_host_pool(pool_bytes: int, weight_bytes: int, num_workers: int, num_ranks: int = 1) -> None:
    """Raise ValueError if a pool in host memory can never be filled beside the weights.

    Logs a warning if the workers of this host together may take more than there is: pages are taken only when they are
    used. A pool of the default size is never refused, since weights may be mapped. `weight_bytes`: of all `num_ranks`
    processes of a worker.
    """
    memory = system.memory_limit()
    if pool_bytes > max(memory - weight_bytes, 2 * POOL_SHARE * memory):  # a share for KV and one for states
        raise ValueError(
            f"num_blocks: {pool_bytes / GIB:.1f} GiB of KV and {weight_bytes / GIB:.1f} GiB of weights do not fit in the "
            f"{memory / GIB:.1f} GiB of this host or container; give fewer, or it a larger limit"
        )
    if (most := num_workers * (pool_bytes + weight_bytes + num_ranks * PROCESS_BYTES)) > memory:
        who, fewer = (
            (f"{num_workers} workers", "workers or --num-blocks")
            if num_workers > 1
            else ("this worker", "--num-blocks")
        )
        logger.warning(
            "memory may run out: %s may take %.1f GiB, and this host or container has %.1f; give fewer %s, "
            "--quantization int8, or a larger limit", who, most / GIB, memory / GIB, fewer,
        )  # fmt: skip


def pool_room(memory: Memory, utilization: float, step_bytes: int) -> int:
    """Return the bytes left of this process's share after what it holds and a step's own `step_bytes`."""
    return min(int(memory.total * utilization) - memory.ours, memory.free) - step_bytes


def pool_states(room: int, state_bytes: int, max_num_seqs: int, has_kv: bool) -> int:
    """Return how many states a pool of `room` bytes has: two for each sequence, at least two.

    With KV, states take at most half of the room.
    """
    return max(2, min(2 * max_num_seqs, room // (1 + has_kv) // state_bytes))


def pool_blocks(memory: Memory, utilization: float, step_bytes: int, block_bytes: int, least: int) -> int:
    """Return how many blocks fit into this process's share after what it holds and a step's own `step_bytes`.

    Other processes count only in what is free, so that two workers may share a GPU. Raises ValueError for fewer than
    `least`.
    """
    left = pool_room(memory, utilization, step_bytes)
    num_blocks = left // block_bytes
    if num_blocks >= least:
        return num_blocks
    raise ValueError(
        f"out of GPU memory: {memory.total / GIB:.1f} GiB, {memory.free / GIB:.1f} of them free, {utilization:g} may be "
        f"used, this process has {memory.ours / GIB:.1f}, a step takes {step_bytes / GIB:.2f}: {max(left, 0) / GIB:.2f} GiB "
        f"are left for KV, at least {least * block_bytes / GIB:.2f} are needed; lower max_num_batched_tokens or max_model_len, or quantize"
    )


class MultiprocessorShare:
    """The share of a GPU's multiprocessors of one engine, whose kernels run on a stream of a CUDA green context.

    So a prefill worker leaves some multiprocessors to a decode worker on the same GPU. Kernels of two processes run at
    the same time only under CUDA's Multi-Process Service. Without it they take turns, and a share slows one process
    without helping the other.
    """

    def __init__(self, device: torch.device, share: float):
        """Make a context of a `share` (between 0 and 1) of the multiprocessors. ValueError, one line, if there can be
        none."""
        total = torch.cuda.get_device_properties(device).multi_processor_count
        self.num_processors = max(SM_MULTIPLE, round(total * share / SM_MULTIPLE) * SM_MULTIPLE)
        self.num_all = total
        if reason := no_green_contexts():
            raise ValueError(f"sm_share {share:g}: {reason}; leave it out")
        from torch.cuda.green_contexts import GreenContext

        try:
            self._context = GreenContext.create(num_sms=self.num_processors, device_id=device.index)
            self.stream: torch.cuda.Stream = self._context.Stream()
            torch.cuda.synchronize(device)  # wait for what other streams load
        except RuntimeError as error:
            reason = one_line(error, 160)
            raise ValueError(
                f"sm_share {share:g}: the driver has no green contexts here ({reason}); leave it out"
            ) from None

    @property
    def summary(self) -> str:
        return f"{self.num_processors} of {self.num_all} multiprocessors"


def no_green_contexts() -> str:
    """Return why torch cannot make green contexts, or "" if it can."""
    try:
        from torch.cuda import green_contexts
    except ImportError:
        return f"torch {torch.__version__} knows no green contexts, 2.13 does"
    if not green_contexts.SUPPORTED or not hasattr(green_contexts.GreenContext, "Stream"):
        return f"torch {torch.__version__} was built without green contexts"
    return ""
