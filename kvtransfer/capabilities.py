"""The capabilities of each transport, best first."""

from dataclasses import dataclass

HOST, DEVICE = "host", "device"  # the memory of a pool


@dataclass(frozen=True, slots=True)
class Capabilities:
    name: str
    same_host: bool
    same_process: bool
    source_sends: bool  # bytes follow the Ready frame; else the taker reads the source's memory
    num_copies: int  # of every byte, kernel included
    memory: tuple[str, ...] = (HOST,)  # pools that it moves between
    reads_runs: bool = False  # the taker's engine moves runs of bytes: between blocks of one size and form only
    passes_proxies: bool = False  # HTTP/2 from end to end


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
