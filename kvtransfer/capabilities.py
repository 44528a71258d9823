"""State what each transport can do. Plain Python: the gateway imports this too."""

from dataclasses import dataclass

HOST, DEVICE = "host", "device"  # the memory of a pool


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one transport needs of both workers, and how it moves bytes."""

    name: str
    same_host: bool
    same_process: bool
    source_sends: bool  # bytes follow the Ready frame; otherwise the taker reads the source's memory
    num_copies: int  # how often each byte is copied, by the kernel too
    memory: tuple[str, ...] = (HOST,)  # where a pool may be that it moves from or to
    reads_runs: bool = False  # the taker copies runs of bytes, so both pools need one block size and form, and no state
    passes_proxies: bool = False  # it is HTTP/2 from end to end


# Best first.
CAPABILITIES = {
    each.name: each
    for each in (
        Capabilities("inproc", same_host=True, same_process=True, source_sends=False, num_copies=1),
        Capabilities(
            "cuda_ipc",
            same_host=True,
            same_process=False,
            source_sends=False,
            num_copies=1,
            memory=(DEVICE,),
            reads_runs=True,
        ),
        Capabilities("shm", same_host=True, same_process=False, source_sends=False, num_copies=1),
        Capabilities(
            "nixl",
            same_host=False,
            same_process=False,
            source_sends=False,
            num_copies=1,
            memory=(HOST, DEVICE),
            reads_runs=True,
        ),
        Capabilities("tcp", same_host=False, same_process=False, source_sends=True, num_copies=2),
        Capabilities("grpc", same_host=False, same_process=False, source_sends=True, num_copies=6, passes_proxies=True),
    )
}
SAME_HOST_TRANSPORTS = frozenset(name for name, each in CAPABILITIES.items() if each.same_host)
RUNS_TRANSPORTS = frozenset(name for name, each in CAPABILITIES.items() if each.reads_runs)
