"""Choose by flags whose workers a command places: those of a running `baton up`, or those of a Kubernetes cluster."""

from __future__ import annotations

import argparse

from baton.cli.launch.cluster.kubernetes import KubernetesLauncher
from baton.cli.launch.control import DEFAULT_ADDRESS, RemoteLauncher
from baton.cli.launch.placing.launcher import WorkerLauncher
from baton.cli.launch.stacks import noted_stacks
from baton.service.arguments import host_port
from baton.service.security.access import Access

KUBERNETES = "kubernetes"


def add_launcher_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Add --launcher and its related flags. `default` says in words whose workers are placed without it."""
    group = parser.add_argument_group("where workers are placed")
    group.add_argument(
        "--launcher",
        type=lambda text: text if text == KUBERNETES else host_port(text),
        metavar=f"HOST:PORT|{KUBERNETES}",
        help=f"control= of `baton up`, or {KUBERNETES} (default: {default})",
    )
    group.add_argument("--namespace", metavar="NAME", help="of Kubernetes (default: this pod's own)")
    group.add_argument("--release", metavar="NAME", help="of Helm, where a namespace has several")
    group.add_argument("--api", metavar="URL", help="of Kubernetes (default: as a pod has it)")


def make_launcher(args: argparse.Namespace, access: Access) -> WorkerLauncher:
    """Return the launcher that the flags name. Raises LaunchError, ValueError."""
    if args.launcher == KUBERNETES:
        return KubernetesLauncher.find(args.namespace, args.release, args.api)
    for name in ("namespace", "release", "api"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} has no effect without --launcher {KUBERNETES}")
    return RemoteLauncher(args.launcher or _only_stack(), access)


def _only_stack() -> str:
    """Return the control address of the one stack on this machine. Raises ValueError if several run or cannot be
    listed."""
    try:
        stacks = noted_stacks()
    except OSError as error:
        raise ValueError(f"the stacks of this machine cannot be seen ({error}): say which with --launcher") from None
    if len(stacks) > 1:
        raise ValueError(f"{len(stacks)} stacks run on this machine: say which with --launcher {' or '.join(stacks)}")
    return stacks[0] if stacks else DEFAULT_ADDRESS
