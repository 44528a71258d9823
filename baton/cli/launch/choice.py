"""Choose by flags whose workers a command places: those of a running `baton up`, or a cluster's of Kubernetes."""

from __future__ import annotations

import argparse

from baton.cli.launch.cluster.kubernetes import KubernetesLauncher
from baton.cli.launch.control import RemoteLauncher
from baton.cli.launch.placing.launcher import WorkerLauncher
from baton.service.security.access import Access

KUBERNETES = "kubernetes"


def add_launcher_flags(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add --launcher and what goes with it."""
    group = parser.add_argument_group("where workers are placed")
    group.add_argument(
        "--launcher",
        default=default,
        metavar=f"HOST:PORT|{KUBERNETES}",
        help=f"control= of `baton up`, or {KUBERNETES} (default: {default or 'none'})",
    )
    group.add_argument("--namespace", metavar="NAME", help="of Kubernetes (default: this pod's own)")
    group.add_argument("--release", metavar="NAME", help="of Helm, where a namespace has several")
    group.add_argument("--api", metavar="URL", help="of Kubernetes (default: as a pod has it)")


def make_launcher(args: argparse.Namespace, access: Access) -> WorkerLauncher:
    """Raises LaunchError, ValueError."""
    if args.launcher == KUBERNETES:
        return KubernetesLauncher.find(args.namespace, args.release, args.api)
    for name in ("namespace", "release", "api"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} has no effect without --launcher {KUBERNETES}")
    return RemoteLauncher(args.launcher, access)
