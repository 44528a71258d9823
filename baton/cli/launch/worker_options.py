"""The options of a stack's workers: read from flags by role, and checked as the workers check them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton import system
from baton.cli.launch.joint_settings import check_kv_ports, check_transports
from baton.cli.launch.placing.gpus import visible_gpus
from baton.cli.launch.placing.launcher import Resources
from baton.protocol import ROLES
from baton.service.settings import SettingsError, given, load_settings, variable
from baton.worker.settings import WorkerSettings

# Settings of a worker that the stack itself sets.
SET_BY_STACK = ("model", "listen", "admin", "gateways", "served_model_name")
Values = dict[str, object]


@dataclass(frozen=True)
class WorkerOptions:
    """What the workers of each role are started with: `values` that were set, by role; the roles that compute on the
    CPU; and the resources of one worker, by role."""

    values: dict[str, Values]
    cpu_roles: list[str]
    resources: dict[str, Resources]


def worker_settings(values: Mapping[str, object], model: Path) -> WorkerSettings:
    """Return a worker's settings from these values, checked as the worker checks them. Raises SettingsError."""
    of_stack = {variable(name) for name in SET_BY_STACK}  # BATON_LISTEN is the gateway's
    env = {name: value for name, value in os.environ.items() if name not in of_stack}
    return load_settings(WorkerSettings, values, env, defaults={"model": model})


def read_worker_options(
    flags: Mapping[str, object],
    implied: Mapping[str, Values],
    models: Mapping[str | None, Path],
    num_workers: Mapping[str, int],
    is_local: bool,
) -> WorkerOptions:
    """Return the options of the workers, of which each model has `num_workers` by role. Flags win over the values that
    are `implied` by other settings, by role. `is_local`: the workers run on this machine. Raises SettingsError."""
    both = given(WorkerSettings, {name: value for name, value in flags.items() if name not in SET_BY_STACK})
    own = {role: given(WorkerSettings, flags, f"{role}.") for role in ROLES}
    _check_flags(both, own, num_workers)
    values = {role: {**implied[role], **both, **own[role]} for role in ROLES}
    settings = [{role: worker_settings(values[role], model) for role in ROLES} for model in models.values()][-1]
    check_transports(settings, num_workers)
    if is_local:
        check_kv_ports(settings, num_workers, len(models))
    engines = {role: each.engine for role, each in settings.items()}
    cpu_roles = [role for role, engine in engines.items() if engine.device == "cpu"]
    resources = {
        role: Resources((each.threads or 1) * each.num_ranks_here, 0 if role in cpu_roles else each.num_ranks_here)
        for role, each in engines.items()
    }
    threads: Mapping[str, int | None] = {role: engine.threads for role, engine in engines.items()}
    # CPU workers of one process divide the cores by themselves if no thread count is given.
    on_gpus = len(cpu_roles) < len(ROLES) and bool(visible_gpus())
    is_divided = on_gpus or any(threads.values()) or any(each.num_ranks_here > 1 for each in engines.values())
    if is_local and is_divided:  # on a cluster, a worker has the cores that are reserved for it
        num_ranks = {role: len(models) * num_workers[role] * each.num_ranks_here for role, each in engines.items()}
        threads = divide_cores(num_ranks, threads)
    for role in ROLES:
        values[role] |= {} if threads[role] is None else {"threads": threads[role]}
    return WorkerOptions(values, cpu_roles, resources)


def divide_cores(num_workers: Mapping[str, int], threads: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the threads of each worker (or rank) by role; where `threads` has None, an equal share of the cores that
    the others leave.

    Two workers with all cores each would wait for one another's threads within every product
    (engine/core/shared_cores). If OMP_NUM_THREADS is set, every worker reads it itself."""
    if "OMP_NUM_THREADS" in os.environ:
        return dict(threads)
    taken = sum(num_workers[role] * (each or 0) for role, each in threads.items())
    num_sharing = sum(num_workers[role] for role, each in threads.items() if each is None)
    share = max(1, (system.num_cores() - taken) // max(1, num_sharing))
    return {role: each or share for role, each in threads.items()}


def _check_flags(both: Values, own: Mapping[str, Values], num_workers: Mapping[str, int]) -> None:
    """Refuse flags of a role without workers, and flags of both roles that each role has too. Raises SettingsError."""
    for role in ROLES:
        if own[role] and not num_workers[role]:
            raise SettingsError(f"--{role}.{next(iter(own[role])).replace('_', '-')} has no effect with --{role} 0")
    for name in both:
        if all(name in own[role] for role in ROLES):
            flag = name.replace("_", "-")
            raise SettingsError(f"--{flag} has no effect beside --prefill.{flag} and --decode.{flag}")
