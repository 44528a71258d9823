"""The settings of `baton up`: flags, variables and a file become the flags of each process of the stack."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from baton.addresses import AddressError, host_of, split_address
from baton.cli.cluster.certs import CA_CERT, CREDENTIALS, SECRET
from baton.cli.launch.hub import find_model, name_on_hub
from baton.cli.launch.joint_settings import check_split
from baton.cli.launch.placing.keeper import StartError
from baton.cli.launch.stack import SHIPPED_MODEL, StackPlan
from baton.cli.launch.worker_options import SET_BY_STACK, WorkerOptions, read_worker_options
from baton.gguf import is_gguf
from baton.options import option
from baton.protocol import ROLES, model_setting, named_models
from baton.service.security.access import Access
from baton.service.security.exposure import is_loopback
from baton.service.settings import (
    SettingsError,
    Sourced,
    add_flags,
    flat_fields,
    from_table,
    given,
    is_in_environment,
    load_settings,
    name_sources,
    read_table,
    sourced_settings,
    to_argv,
    variable,
)
from baton.worker.settings import WorkerSettings
from gateway.config.settings import GatewaySettings

# Settings of a gateway that `baton up` itself sets.
_NOT_GATEWAY_OPTIONS = (
    "model", "served_model_name", "listen", "http", "prefill_workers", "decode_workers", "redis", "admin",
)  # fmt: skip
_GATEWAY_DEFAULTS: Mapping[str, object] = {"stand_in": True}  # a stack often has one worker per role, and each may die
_COUNTED_WORDS = "counted; 1 with --launcher ray"
COUNTED: Mapping[str, str] = {"workers_per_host": _COUNTED_WORDS, "workers_per_gpu": _COUNTED_WORDS}
_SHIPPED_NAME = "baton-demo"
# The options in the one-screen help; --help-all shows the rest.
_SHORT = ("model", "listen", "http", "prefill", "decode", "launcher", "redis", "certs", "quantization", "speculator")
LAUNCHERS = ("local", "ray")
# Added to the grace period: KV moves to other workers, and spans are flushed.
_WORKER_BEYOND_S, _GATEWAY_BEYOND_S = 7.0, 10.0


@dataclass(frozen=True)
class UpSettings:
    """The settings of `baton up` itself; worker and gateway options come on top."""

    model: str | None = option(
        "model folder, .gguf file, OWNER/NAME[@REVISION][:FILE.gguf] on a hub, or s3://, gs://, https:// URL; several with the "
        "names by which requests ask for them (default: the shipped one)",
        None,
        metavar="DIR|FILE|NAME|NAME=DIR,...",
    )
    listen: str = option("address for clients; port 0: the system chooses", "127.0.0.1:50051", metavar="HOST:PORT")
    http: str | None = option(
        "address of the HTTP API in OpenAI's form (default: not served)", None, metavar="HOST:PORT"
    )
    prefill: int = option("number of prefill workers, of each model", 1, metavar="N")
    decode: int = option("number of decode workers, of each model", 1, metavar="N")
    gateways: int = option(
        "number of gateways; those beyond the first at ports that the system chooses", 1, metavar="N"
    )
    together: bool = option(
        "one gateway and one worker as one process, in place of --prefill and --decode workers", False
    )
    served_model_name: str | None = option(
        "name of a single model for clients (default: its folder's)", None, metavar="NAME"
    )
    launcher: str = option("where workers are placed: on this machine, or on a Ray cluster", "local", choices=LAUNCHERS)
    address: str | None = option(
        "address of the Ray cluster, as ray.init takes it (default: auto, the one that this machine is part of)",
        None,
        metavar="auto|HOST:PORT",
    )
    control: str | None = option(
        "address for operators who scale the stack (default: 127.0.0.1:50050, or another port where that is taken)",
        None,
        metavar="HOST:PORT",
    )
    redis: str | None = option("prefix index in Redis (default: embedded)", None, metavar="URL")
    admin: str | None = option("address of the admin server", None, metavar="HOST:PORT")
    certs: Path | None = option("TLS and credentials of this folder, which `baton certs` wrote", None, metavar="DIR")

    @property
    def models(self) -> Mapping[str | None, Path]:
        """The models to serve, by name; the name None stands for a single model named by its folder. Raises
        ValueError."""
        return {None: SHIPPED_MODEL} if self.model is None else named_models(self.model)

    @property
    def num_workers(self) -> dict[str, int]:
        """How many workers each model has, by role. A single decode worker also reads prompts."""
        return {"prefill": 0, "decode": 1} if self.together else {"prefill": self.prefill, "decode": self.decode}

    def __post_init__(self) -> None:
        self._check_together()
        self._check_addresses()
        if None not in self.models and self.served_model_name:
            raise ValueError("--served-model-name has no effect: --model gives names")
        if len(self.models) > 1 and self.launcher == "ray":
            raise ValueError("--launcher ray serves one model; --model names several")
        if self.prefill < 0:
            raise ValueError(f"--prefill {self.prefill}: must not be negative")
        if self.decode < 1:
            raise ValueError(f"--decode {self.decode}: at least one decode worker is needed")
        if self.gateways < 1:
            raise ValueError(f"--gateways {self.gateways}: at least one is needed")
        if self.address is not None and self.launcher != "ray":
            raise ValueError("--address has no effect without --launcher ray")
        if self.control is not None and self.certs is None and not is_loopback(self.control):
            raise ValueError(f"--control {self.control}: beyond loopback this needs --certs")

    def _check_together(self) -> None:
        if not self.together:
            return
        if max(self.prefill, self.decode, self.gateways) > 1:
            raise ValueError("--together is one gateway and one worker; leave --prefill, --decode and --gateways out")
        if len(self.models) > 1:
            raise ValueError("--together serves one model; --model names several")
        if self.launcher != "local":
            raise ValueError(f"--together is one process of this machine; leave --launcher {self.launcher} out")

    def _check_addresses(self) -> None:
        taken: dict[str, str] = {}
        for name in ("listen", "http", "control", "admin"):
            address = getattr(self, name)
            if address is None:
                continue
            try:
                _, port = split_address(address)
            except AddressError as error:
                raise ValueError(f"--{name}: {error}") from None
            if port and address in taken:
                raise ValueError(f"--{name} {address}: is --{taken[address]} too; give each its own port")
            taken[address] = name


# Tables of the file, with the prefix of their flags, the settings class, and the fields that a table may not set.
_TABLES = {
    "prefill_worker": ("prefill.", WorkerSettings, SET_BY_STACK),
    "decode_worker": ("decode.", WorkerSettings, SET_BY_STACK),
    "gateway": ("gateway.", GatewaySettings, _NOT_GATEWAY_OPTIONS),
}


@dataclass(frozen=True)
class Resolved:
    """All settings of a stack, joined and checked. `models` by name, None for a single one; `num_workers` per model and
    role; `gateway`: values of the gateway that were set; `sources`: where a value was set other than by a flag, by the
    flag's name."""

    up: UpSettings
    models: Mapping[str | None, Path]
    num_workers: dict[str, int]
    workers: WorkerOptions
    gateway: dict[str, object]
    sources: dict[str, str]


def add_up_flags(parser: argparse.ArgumentParser, is_short: bool) -> None:
    """Add the flags of `baton up`. `is_short`: the help shows only those that most users need."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML, as `baton config` prints them")
    shown = _SHORT if is_short else None
    add_flags(parser, UpSettings, shown=shown, names_variable=not is_short)
    workers = parser.add_argument_group("worker options", "Of both roles; --prefill.OPTION and --decode.OPTION of one.")
    add_flags(workers, WorkerSettings, skip=SET_BY_STACK, shown=shown, names_variable=not is_short, defaults=COUNTED)
    for role in ROLES:
        add_flags(parser, WorkerSettings, f"{role}.", skip=SET_BY_STACK, hidden=True)
    gateway = parser if is_short else parser.add_argument_group("gateway options")
    add_flags(
        gateway,
        GatewaySettings,
        "gateway.",
        skip=_NOT_GATEWAY_OPTIONS,
        hidden=is_short,
        names_variable=not is_short,
        defaults=_GATEWAY_DEFAULTS,
    )


def options_of(cls: type) -> list[str]:
    """Return the fields of UpSettings, WorkerSettings or GatewaySettings that users of `baton up` can set."""
    skip = {WorkerSettings: SET_BY_STACK, GatewaySettings: _NOT_GATEWAY_OPTIONS}.get(cls, ())
    return [name for name in flat_fields(cls) if name not in skip]


def gateway_settings(found: Resolved) -> GatewaySettings:
    """Return the gateway's settings, checked as the gateway checks them. Raises SettingsError that names flags of
    `baton up`."""
    values = {"model": model_setting(found.models), "listen": found.up.listen, **found.gateway}
    values |= {"http": found.up.http} if found.up.http else {}
    try:
        settings = load_settings(GatewaySettings, values)
    except SettingsError as error:
        flags = "|".join(name.replace("_", "-") for name in options_of(GatewaySettings))
        raise SettingsError(re.sub(rf"--({flags})(?![\w-])", r"--gateway.\1", str(error))) from None
    check_split(settings, found.num_workers)
    return settings


def make_plan(args: argparse.Namespace) -> StackPlan:
    """Return the plan of the stack, with everything checked that can be before a process starts; download models from a
    hub. Raises SettingsError or StartError."""
    found = resolve(args)
    gateway_settings(found)
    up, models = found.up, {name: _present(path, found.up) for name, path in found.models.items()}
    gateway = dict(found.gateway)
    # the Redis URL may have a password
    fleet_listen, redis = gateway.pop("fleet_listen", None), gateway.pop("redis", None)
    workers = found.workers.values
    drain_s = {role: _WORKER_BEYOND_S + _grace_s(WorkerSettings, values) for role, values in workers.items()}
    gateway_drain_s = _GATEWAY_BEYOND_S + _grace_s(GatewaySettings, gateway)
    return StackPlan(
        models=models,
        listen=up.listen,
        num_workers=found.num_workers,
        worker_options={role: to_argv(WorkerSettings, values) for role, values in workers.items()},
        gateway_options=to_argv(GatewaySettings, gateway),
        gateway_env={} if redis is None else {variable("redis"): str(redis)},
        num_gateways=up.gateways,
        cpu_roles=found.workers.cpu_roles,
        http=up.http,
        fleet_listen=None if fleet_listen is None else str(fleet_listen),
        control=up.control,
        access=Access(**_tls_files(up.certs, "gateway")) if up.certs else Access(),
        ray_address=(up.address or "auto") if up.launcher == "ray" else None,
        resources=found.workers.resources,
        together=up.together,
        drain_s=drain_s,
        # both drain in one process, the gateway first
        gateway_drain_s=gateway_drain_s + (drain_s["decode"] if up.together else 0),
    )


def _grace_s(cls: type[WorkerSettings] | type[GatewaySettings], values: Mapping[str, object]) -> float:
    """Return the grace period of a process with these values, in seconds. Raises SettingsError."""
    given = sourced_settings(cls, values).get("drain_grace_s")
    grace_s = cls.drain_grace_s if given is None else given.value
    assert isinstance(grace_s, float)
    return grace_s


def _present(given: Path, up: UpSettings) -> Path:
    """Return the folder or file of a model, downloaded if it is on a hub. Raises StartError."""
    model = find_model(given)
    wanted = model if is_gguf(model) else model / "config.json"
    if not wanted.is_file():
        what = "give --model DIR" if up.model is None else "is it a model folder?"
        raise StartError(f"{wanted} does not exist; {what}", 2)
    return model


def resolve(args: argparse.Namespace) -> Resolved:
    """Join the settings: file < variables < flags. Raises SettingsError."""
    from_file = _from_file(args)
    flags = {**{name: each.value for name, each in from_file.items()}, **vars(args)}
    try:
        settings = load_settings(UpSettings, flags)
        models = settings.models
        if settings.served_model_name is None and None in models:
            name = _SHIPPED_NAME if settings.model is None else name_on_hub(models[None])
            settings = replace(settings, served_model_name=name)
        gateway = {name: value for name, value in _GATEWAY_DEFAULTS.items() if not is_in_environment(name)}
        if is_in_environment("fleet_listen"):  # then each gateway has its own address there, and workers are told
            gateway["fleet_listen"] = os.environ[variable("fleet_listen")]
        gateway |= {
            name: value for name in ("redis", "admin", "served_model_name") if (value := getattr(settings, name))
        }
        folder = _folder_values(settings)
        gateway = {**folder["gateway"], **gateway}
        gateway |= given(GatewaySettings, flags, "gateway.")
        num_workers, served_as = settings.num_workers, settings.served_model_name
        named = {"served_model_name": served_as} if served_as else {}
        implied = {role: {**folder[role], **named} for role in ROLES}
        workers = read_worker_options(flags, implied, models, num_workers, is_local=settings.launcher == "local")
    except SettingsError as error:
        raise SettingsError(
            name_sources(str(error), {name.rpartition(".")[2]: each for name, each in from_file.items()})
        ) from None
    sources = _folder_sources(folder, flags)
    sources |= {name: each.source for name, each in from_file.items() if name not in vars(args)}
    return Resolved(settings, models, num_workers, workers, gateway, sources)


def _from_file(args: argparse.Namespace) -> dict[str, Sourced]:
    """Return what the --config file sets and neither variables nor flags override, by the name of the flag. Raises
    SettingsError."""
    if args.config is None:
        return {}
    table, found = read_table(args.config), {}
    for name, (prefix, cls, skip) in _TABLES.items():
        section = table.pop(name, {})
        if not isinstance(section, dict):
            raise SettingsError(f"{args.config}: {name} is a table, [{name}]")
        for field, each in from_table(cls, section, f"{args.config}: [{name}]", skip).items():
            found[prefix + field] = each
    own = {key: table.pop(key) for key in list(table) if key.replace("-", "_") in flat_fields(UpSettings)}
    found |= from_table(UpSettings, own, args.config)
    found |= from_table(WorkerSettings, table, args.config, SET_BY_STACK, beside=flat_fields(UpSettings))

    def is_overridden(name: str) -> bool:
        bare = name.rpartition(".")[2]
        return is_in_environment(bare) or (bare in vars(args) and not name.startswith("gateway."))

    return {name: each for name, each in found.items() if not is_overridden(name)}


def _folder_values(up: UpSettings) -> Mapping[str, Mapping[str, object]]:
    """Return the settings that the --certs folder implies, by role. Raises SettingsError."""
    if up.certs is None:
        return {"gateway": {}, **{role: {} for role in ROLES}}
    # Workers on other nodes register there.
    fleet_host = host_of(up.listen) if up.launcher == "ray" else "127.0.0.1"
    own = {
        "credentials": up.certs / CREDENTIALS,
        "cluster_secret": up.certs / SECRET,
        "fleet_listen": f"{fleet_host}:0",
    }
    # The TLS files are not overridden by variables: each role has its certificate, and the variables are for commands
    # that call the stack.
    own = {name: value for name, value in own.items() if not is_in_environment(name)}
    return {
        "gateway": {**_tls_files(up.certs, "gateway"), **own},
        **{role: _tls_files(up.certs, role) for role in ROLES},
    }


def _folder_sources(folder: Mapping[str, Mapping[str, object]], flags: Collection[str]) -> dict[str, str]:
    """Return the source of each value that comes from the --certs folder and is not overridden."""
    named = [(role, name) for role, values in folder.items() for name in values]
    return {
        f"{role}.{name}": "the folder of --certs"
        for role, name in named
        if f"{role}.{name}" not in flags and (role == "gateway" or name not in flags)
    }


def _tls_files(certs: Path, role: str) -> dict[str, Path]:
    """Return the certificate files of a role. Raises SettingsError."""
    files = {"tls_cert": certs / f"{role}.crt", "tls_key": certs / f"{role}.key", "tls_ca": certs / CA_CERT}
    for path in files.values():
        if not path.is_file():
            raise SettingsError(
                f"--certs {certs}: {path.name} is not there; `baton certs --out DIR` writes such a folder"
            )
    return files
