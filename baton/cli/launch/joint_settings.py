"""Settings of processes of one stack that exclude each other, each of them right by itself: refused before any is
started."""

from collections.abc import Mapping

from baton.protocol import ROLES
from baton.service.settings import SettingsError
from baton.worker.settings import WorkerSettings
from gateway.config.settings import GatewaySettings


def check_split(gateway: GatewaySettings, num_workers: Mapping[str, int]) -> None:
    """Raises SettingsError where each prompt would wait for a prefill worker, and there is none."""
    if gateway.split == "always" and not gateway.stand_in and not num_workers["prefill"]:
        raise SettingsError(
            "--gateway.split always: with --prefill 0, as with --together, nobody would read a prompt; leave it out, "
            "or --no-gateway.stand-in"
        )


def check_transports(workers: Mapping[str, WorkerSettings], num_workers: Mapping[str, int]) -> None:
    """Raises SettingsError where no KV could pass from one role to the other. `workers`: one of each role."""
    prefill, decode = (workers[role].transports for role in ROLES)
    if num_workers["prefill"] and set(prefill).isdisjoint(decode) and "auto" not in (*prefill, *decode):
        raise SettingsError(
            f"--prefill.transports {','.join(prefill)} and --decode.transports {','.join(decode)} have none in common, by "
            "which KV could pass"
        )


def check_kv_ports(workers: Mapping[str, WorkerSettings], num_workers: Mapping[str, int], num_models: int) -> None:
    """Raises SettingsError where workers of this machine would listen at one port. `workers`: one of each role."""
    ports = {role: each.kv_port for role, each in workers.items()}
    for port in set(ports.values()) - {0}:
        num_sharing = num_models * sum(num_workers[role] for role in ROLES if ports[role] == port)
        if num_sharing > 1:
            raise SettingsError(
                f"--kv-port {port}: {num_sharing} workers of this machine would listen there; leave it out, or give one worker "
                "each by --prefill.kv-port and --decode.kv-port"
            )
