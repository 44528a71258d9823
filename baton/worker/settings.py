"""Settings of a worker, the same for both roles. Imports no torch."""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from baton.addresses import AddressError, bare_host_of, split_address
from baton.engine.core.config import EngineConfig
from baton.options import option
from baton.service.security.exposure import Exposure, is_loopback
from kvtransfer.memory.cuda_runtime import find_runtime, gpu_refusal
from kvtransfer.transports.socket_folder import default_parent

TRANSPORTS = ("auto", "cuda_ipc", "shm", "nixl", "tcp", "grpc")
LEAST_LEASE_S = 2.0  # gateways renew a lease every 1.5 s, fetching workers every second
IN_PLAIN_TEXT = ("nixl", "tcp")  # transports that reach other machines and have no TLS
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"({_LABEL}\.)*{_LABEL}")


@dataclass(frozen=True)
class WorkerSettings(Exposure):
    """Settings of a worker process. Those of its engine are declared by EngineConfig and are flags of the worker too.
    Raises ValueError, one line, for a setting that can have no effect."""

    engine: EngineConfig
    listen: str = option("address of the gRPC server; port 0: the system chooses", "127.0.0.1:0", metavar="HOST:PORT")
    admin: str = option("address of /healthz, /readyz and /metrics", "127.0.0.1:0", metavar="HOST:PORT")
    rank_listen: str | None = option(
        "address where the processes of --remote-stages join: `baton rank --leader HOST:PORT`",
        None,
        metavar="HOST:PORT",
    )
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
    kv_port: int = option(
        "first of the ports at which other machines take KV: those of grpc, tcp and nixl, of which with TLS there is grpc alone, "
        "then those of each further GPU; 0: the system chooses each", 0, metavar="PORT"
    )  # fmt: skip
    gateways: tuple[str, ...] = option(
        "gateways to register with; one is enough if they share a Redis", (), metavar="HOST:PORT,..."
    )
    strict_numerics: bool = option("exchange KV only with workers of the same numerics class", False)
    kv_digest: str = option(
        "digest that verifies received KV; use sha256 on a network without TLS where others could alter data", "sum",
        choices=("sum", "sha256"),
    )  # fmt: skip
    kv_mirror_gib: float | None = option(
        "GiB of host memory for KV of a GPU that crosses by another transport than cuda_ipc (default: half of what is "
        "available, divided by the GPUs)", None
    )  # fmt: skip
    insecure_kv: bool = option(
        "allow KV to travel unencrypted over tcp and nixl beyond loopback although TLS is configured", False
    )
    lease_ttl_s: float = option("seconds that KV waits for a worker to fetch it before its blocks are freed", 5.0)
    drain_grace_s: float = option("seconds after SIGTERM until requests that still run move to other workers", 8.0)
    resume_window_s: float = option("seconds that a sequence can be resumed after its gateway is lost", 30.0)
    log_level: str = option("lowest level that is logged", "info", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        self._check_gpu()
        if not LEAST_LEASE_S <= self.lease_ttl_s < 3600:
            raise ValueError(f"--lease-ttl-s {self.lease_ttl_s:g}: must be at least {LEAST_LEASE_S:g} and below 3600")
        for name in ("drain_grace_s", "resume_window_s"):
            if not 0 < getattr(self, name) < 3600:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be above 0 and below 3600")
        if self.kv_mirror_gib is not None and self.kv_mirror_gib <= 0:
            raise ValueError(f"--kv-mirror-gib {self.kv_mirror_gib:g}: must be above 0")
        if not self.transports:
            raise ValueError("--transports is empty: give auto, or some of " + ", ".join(TRANSPORTS[1:]))
        if (root := self.engine.adapter_root) is not None and not root.is_dir():
            raise ValueError(f"--adapter-root {root}: no such folder")
        self._check_address()
        if self.engine.remote_stages and self.rank_listen is None:
            raise ValueError(f"--remote-stages {self.engine.remote_stages}: say by --rank-listen where they join")
        if self.rank_listen is not None and not self.engine.remote_stages:
            raise ValueError("--rank-listen has no effect without --remote-stages; leave it out")
        listens = {"--listen": self.listen, **({"--rank-listen": self.rank_listen} if self.rank_listen else {})}
        self.check_exposure(listens, self.admin, self.tls is not None, "--tls-cert, --tls-key and --tls-ca")
        if named := [name for name in self.transports if name in IN_PLAIN_TEXT and not self._may_be_plain]:
            raise ValueError(
                f"--transports {named[0]}: is in plain text, and --listen {self.listen} is beyond loopback; "
                "give grpc, which has TLS, or say --insecure-kv"
            )

    @property
    def listen_host(self) -> str:
        return bare_host_of(self.listen)

    @property
    def host_folder(self) -> Path:
        """Return the folder by which the workers of this host find each other."""
        return self.kv_socket_dir or default_parent()

    def address_at(self, port: int) -> str:
        """Return the address at which gateways reach this worker when it listens on `port`."""
        host = self.advertise_host or self.listen_host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def _may_be_plain(self) -> bool:
        return self.tls is None or self.insecure_kv or is_loopback(self.listen)

    @property
    def refused_transports(self) -> tuple[str, ...]:
        """Return the transports that `auto` must not choose."""
        return () if self._may_be_plain else IN_PLAIN_TEXT

    def _check_address(self) -> None:
        """Raise ValueError for an address at which takers could not find this worker's KV."""
        if self.kv_socket_dir is not None and not self.kv_socket_dir.is_dir():
            raise ValueError(f"--kv-socket-dir {self.kv_socket_dir}: no such folder")
        self._check_kv_port()
        host = self.advertise_host
        if host is not None and (not _is_host(host) or host in ("0.0.0.0", "::")):
            raise ValueError(f"--advertise-host {host}: give a host name or an IP address, without a port")
        is_everywhere = self.listen_host in ("0.0.0.0", "::")
        if self.gateways and is_everywhere and host is None:
            raise ValueError(f"--gateways: with --listen {self.listen} say by --advertise-host where this worker is")
        for gateway in self.gateways:
            try:
                _, port = split_address(gateway)
            except AddressError as error:
                raise ValueError(f"--gateways: {error}") from None
            if not port:
                raise ValueError(f"--gateways: {gateway}: nobody listens at port 0")

    def _check_kv_port(self) -> None:
        """Raise ValueError if --kv-port has no effect, or too few ports follow it."""
        if not self.kv_port:
            return
        from kvtransfer.transports.endpoints import num_ports  # imports numpy and protobuf, which takes 0.3 s

        chosen = set(self.transports)
        if "auto" in chosen:
            chosen |= set(TRANSPORTS) - set(self.refused_transports)
        if not (num := num_ports(list(chosen))):
            raise ValueError(f"--kv-port has no effect with --transports {','.join(self.transports)}; leave it out")
        num *= self.engine.num_ranks_here if self._may_have_gpu else 1
        last = 65536 - num
        if not 0 < self.kv_port <= last:
            why = f", for {num} ports from there on" if num > 1 else ""
            raise ValueError(f"--kv-port {self.kv_port}: must be from 1 to {last}{why}, or 0: the system chooses")

    @property
    def _may_have_gpu(self) -> bool:
        """Return whether a GPU may be used, as the driver says, since torch is not imported yet."""
        return self.engine.device != "cpu" and find_runtime() is not None

    def _check_gpu(self) -> None:
        """Raise ValueError for a setting that needs a GPU if there is none."""
        engine = self.engine
        if self._may_have_gpu:
            return
        why = f"a CPU ({gpu_refusal()})" if engine.device == "auto" else "a CPU"
        if engine.device == "cuda":
            raise ValueError(f"--device cuda: {gpu_refusal()}; or leave it at auto, or give cpu")
        if "cuda_ipc" in self.transports:
            raise ValueError("--transports cuda_ipc: KV is on no GPU here; leave it at auto, or give shm or tcp")
        if not engine.cuda_graphs:
            raise ValueError(f"--no-cuda-graphs has no effect on {why}; leave it out")
        if engine.sm_share is not None:
            raise ValueError(f"--sm-share has no effect on {why}; give --threads")
        if self.kv_mirror_gib is not None:
            raise ValueError(f"--kv-mirror-gib has no effect on {why}; leave it out")
        if engine.workers_per_gpu > 1:
            raise ValueError(f"--workers-per-gpu has no effect on {why}; leave it out")
        if engine.gpu_memory_utilization is not None:
            raise ValueError(f"--gpu-memory-utilization has no effect on {why}; size the pool with --num-blocks")


def _is_host(text: str) -> bool:
    """Return whether `text` is a host name, or an IP address that means the same on other machines: one with a scope
    does not."""
    if ":" not in text:
        return bool(_HOST.fullmatch(text))
    try:
        return "%" not in text and bool(ipaddress.ip_address(text))
    except ValueError:
        return False
