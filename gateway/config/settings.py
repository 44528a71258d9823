"""Settings of a gateway process."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.addresses import AddressError, split_address
from baton.options import option
from baton.protocol import ROLES, check_model_name, named_models
from baton.service.security.exposure import Exposure, is_loopback
from gateway.config.networks import Networks
from gateway.config.served_model import PRESETS
from gateway.model.model_identities import ModelIdentities
from gateway.parsers.formats import NAMES as FORMAT_NAMES

SPLITS = ("auto", "always", "never")


@dataclass(frozen=True)
class GatewaySettings(Exposure):
    """Settings of one gateway. Raises ValueError, one line, for what cannot work."""

    model: str = option(
        "model folder or .gguf file, whose weights are not read; several with the names by which requests ask for them",
        metavar="DIR|FILE|NAME=DIR,...",
    )
    model_root: Path | None = option(
        "folder below which operators may name models that this gateway adds while it runs (default: none may be)",
        None,
        metavar="DIR",
    )
    served_model_name: str | None = option(
        "name of a single model for clients, metrics and traces (default: its folder's or file's)", None, metavar="NAME"
    )
    tool_call_parser: str = option(
        "form in which the model writes tool calls and reasoning (auto: that of its chat template; none: answers are "
        "plain text)",
        "auto",
        choices=("auto", "none", *FORMAT_NAMES),
    )
    listen: str = option("address for clients; port 0: the system chooses", "127.0.0.1:50051", metavar="HOST:PORT")
    http: str | None = option(
        "address of the HTTP API in OpenAI's form (default: not served)", None, metavar="HOST:PORT"
    )
    http_origins: tuple[str, ...] = option(
        "origins of web pages that browsers may let call --http (default: none)", (), metavar="URL,..."
    )
    prefill_workers: tuple[str, ...] = option("prefill workers; others may register", (), metavar="HOST:PORT,...")
    decode_workers: tuple[str, ...] = option("decode workers; others may register", (), metavar="HOST:PORT,...")
    worker_networks: tuple[str, ...] = option(
        "networks within which workers may register (default: this host alone)", (), metavar="CIDR,..."
    )
    model_identity: tuple[str, ...] = option(
        "digests of the models that workers may serve, as their ready line prints them, or @FILE with one digest a "
        "line, reloaded when it changes (default: the digest of the first worker)",
        (),
        metavar="HEX,...|@FILE",
    )
    redis: str | None = option(
        "Redis for the prefix index, shared with other gateways (default: in memory)", None, metavar="URL"
    )
    admin: str = option("address of /healthz, /readyz and /metrics", "127.0.0.1:0", metavar="HOST:PORT")
    trace_url: str | None = option(
        "URL of a trace, {trace_id} in it standing for the id, that the admin page links to (default: no link)",
        None,
        metavar="URL",
    )
    cluster_secret: Path | None = option(
        "file with the secret that salts the names of cached prefixes (default, on loopback only: derived from the "
        "model)",
        None,
        metavar="FILE",
    )
    credentials: Path | None = option(
        "TOML file with the tenants' API keys; reloaded when it changes", None, metavar="FILE"
    )
    fleet_listen: str | None = option(
        "address for operators and for workers that register, by client certificate; needs TLS",
        None,
        metavar="HOST:PORT",
    )
    public_prefixes: Path | None = option(
        "TOML file of prompts whose cached KV all tenants share (default: tenants share nothing)", None, metavar="FILE"
    )
    control_tokens_in_prompts: bool = option(
        "parse control tokens such as <|im_start|> in a prompt's text, as vLLM and llama.cpp do; otherwise they are plain "
        "text, as they always are in conversations",
        False,
    )
    limits: str = option("limits on a single request", "normal", choices=tuple(PRESETS))
    slo_classes: Path | None = option(
        'TOML file of latency goals by class, name = "ttft=300ms,tpot=50ms" (default: interactive, standard, batch)',
        None,
        metavar="FILE",
    )
    quotas: Path | None = option(
        "TOML file of quotas by tenant: tokens_per_s, burst_tokens, concurrent_requests, max_priority "
        "(default: unlimited, no priority)",
        None,
        metavar="FILE",
    )
    adapter_tenants: Path | None = option(
        'TOML file of the tenants that may use an adapter, name = ["tenant", ...]; to others it does not exist (default: all '
        "tenants may)",
        None,
        metavar="FILE",
    )
    trace_sample: float = option("fraction of the traces started here that is exported; 0 to 1", 1.0)
    split: str = option(
        "when to read the prompt on a prefill worker instead of the decode worker", "auto", choices=SPLITS
    )
    max_concurrent_requests: int = option("requests in the gateway at the same time", 256)
    max_queued_requests: int = option("requests of a model that may wait for a free worker", 128)
    max_queued_tokens: int = option("prompt tokens of the waiting requests of a model", 262_144)
    max_queue_wait_s: float = option("longest wait for a free worker, in seconds", 10.0)
    max_start_wait_s: float = option(
        "longest wait for a worker that is starting, in seconds; 0: a request whose role has no worker is refused", 30.0
    )
    stand_in: bool = option(
        "let a prefill worker answer while no decode worker serves, and a decode worker read while no prefill worker does",
        False,
    )
    max_unread_tokens: int = option("tokens that a slow client may leave unread before its request is ended", 4096)
    default_timeout_s: float = option("deadline of requests without one, in seconds", 600.0)
    max_timeout_s: float = option("longest deadline, in seconds; a later one counts as this", 3600.0)
    drain_grace_s: float = option("seconds that running streams may continue after SIGTERM", 30.0)
    log_level: str = option("lowest level that is logged", "info", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        check_model_name(self.served_model_name, "--served-model-name")
        if None not in self.models and self.served_model_name:
            raise ValueError("--served-model-name has no effect: --model gives names")
        if self.model_root is not None and not self.model_root.is_dir():
            raise ValueError(f"--model-root {self.model_root}: no such folder")
        self._check_workers()
        if both := set(self.prefill_workers) & set(self.decode_workers):
            raise ValueError(f"{both.pop()}: is in --prefill-workers and in --decode-workers")
        try:
            Networks(self.worker_networks)
        except ValueError as error:
            raise ValueError(f"--worker-networks: {error}") from None
        try:
            self.model_identities()
        except ValueError as error:
            raise ValueError(f"--model-identity: {error}") from None
        self._check_numbers()
        if not 0 <= self.max_start_wait_s < 3600:
            raise ValueError(f"--max-start-wait-s {self.max_start_wait_s}: must be 0 or more, and below 3600")
        is_protected = bool(self.tls and self.credentials)
        self.check_exposure(
            self._listens,
            self.admin,
            is_protected,
            "--tls-cert, --tls-key, --tls-ca and --credentials, which `baton certs` makes",
        )
        self._check_doors()
        if not 0 <= self.trace_sample <= 1:
            raise ValueError(f"--trace-sample {self.trace_sample}: must be 0 to 1")
        if self.cluster_secret is None and not self.is_loopback:
            flag, address = next(each for each in self._listens.items() if not is_loopback(each[1]))
            raise ValueError(f"{flag} {address}: outside loopback, names of cached prefixes need --cluster-secret")

    def _check_workers(self) -> None:
        """Raise ValueError for an address that cannot be dialled."""
        for role in ROLES:
            for address in getattr(self, f"{role}_workers"):
                try:
                    split_address(address)
                except AddressError as error:
                    raise ValueError(f"--{role}-workers: {error}") from None

    def _check_numbers(self) -> None:
        """Raise ValueError for a number that is too low, or is NaN."""
        over_0 = (
            "max_concurrent_requests",
            "max_queued_tokens",
            "max_unread_tokens",
            "default_timeout_s",
            "max_timeout_s",
        )
        for name in over_0:
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be over 0")
        for name in ("max_queued_requests", "max_queue_wait_s", "drain_grace_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be 0 or more")

    def _check_doors(self) -> None:
        if self.http_origins and self.http is None:
            raise ValueError("--http-origins has no effect without --http")
        if self.trace_url and not re.fullmatch(r"https?://[^\s\"'<>]*\{trace_id\}[^\s\"'<>]*", self.trace_url):
            raise ValueError(f"--trace-url {self.trace_url}: give an http:// or https:// URL with {{trace_id}} in it")
        if self.tls and self.credentials is None:
            raise ValueError("--credentials is missing: with TLS alone no client could identify itself")
        if self.credentials is not None and self.cluster_secret is None:
            raise ValueError("--cluster-secret is missing: it keeps the caches of tenants apart")
        if self.fleet_listen is not None and self.tls is None:
            raise ValueError("--fleet-listen has no effect without --tls-cert; workers and operators use --listen")

    @property
    def models(self) -> Mapping[str | None, Path]:
        """The folders or files of models by name; the name None stands for that of a single model's folder. Raises
        ValueError."""
        return named_models(str(self.model))

    def model_identities(self) -> ModelIdentities:
        """Return the list of models that workers may serve. Raises ValueError."""
        return ModelIdentities(self.model_identity, bool(self.prefill_workers or self.decode_workers))

    @property
    def is_loopback(self) -> bool:
        """Whether clients can only come from this host."""
        return all(map(is_loopback, self._listens.values()))

    @property
    def _listens(self) -> dict[str, str]:
        """The addresses for clients, by flag."""
        return {"--listen": self.listen, **({"--http": self.http} if self.http else {})}
