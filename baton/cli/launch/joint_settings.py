"""Refuse settings of a stack's processes that are valid alone but exclude each other, before any process starts."""

from collections.abc import Mapping

from baton.protocol import ROLES
from baton.service.settings import SettingsError
from baton.worker.settings import WorkerSettings
from gateway.config.settings import GatewaySettings


def check_split(gateway: GatewaySettings, num_workers: Mapping[str, int]) -> None:
    """Refuse settings under which each prompt would wait for a prefill worker though there is none. Raises
    SettingsError."""
    if gateway.split == "always" and not gateway.stand_in and not num_workers["prefill"]:
        raise SettingsError(
            "--gateway.split always: with --prefill 0, as with --together, nobody would read a prompt; leave it out, "
            "or --no-gateway.stand-in"
        )


def check_transports(workers: Mapping[str, WorkerSettings], num_workers: Mapping[str, int]) -> None:
    """Refuse transports that could not move KV between the roles. `workers` has the settings of one worker per role.
    Raises SettingsError."""
    prefill, decode = (workers[role].transports for role in ROLES)
    if num_workers["prefill"] and set(prefill).isdisjoint(decode) and "auto" not in (*prefill, *decode):
        raise SettingsError(
            f"--prefill.transports {','.join(prefill)} and --decode.transports {','.join(decode)} have none in common, by "
            "which KV could pass"
        )


def check_kv_ports(workers: Mapping[str, WorkerSettings], num_workers: Mapping[str, int], num_models: int) -> None:
    """Refuse settings under which several workers of this machine would listen at one port. `workers` has the settings
    of one worker per role. Raises SettingsError."""
    ports = {role: each.kv_port for role, each in workers.items()}
    for port in set(ports.values()) - {0}:
        num_sharing = num_models * sum(num_workers[role] for role in ROLES if ports[role] == port)
        if num_sharing > 1:
            raise SettingsError(
                f"--kv-port {port}: {num_sharing} workers of this machine would listen there; leave it out, or give one worker "
                "each by --prefill.kv-port and --decode.kv-port"
            )
