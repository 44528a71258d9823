"""Two network namespaces that stand for two hosts: how a test is alone in one, and the mark of those that take both."""

import subprocess

import pytest

ALONE = ("unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
LINK = (
    "ip link add here type veth peer name there && tc qdisc add dev here root tbf rate 1mbit burst 32kbit latency 400ms"
)
two_hosts_can_be_made = [
    pytest.mark.long,
    pytest.mark.skipif(
        subprocess.run([*ALONE, "sh", "-c", LINK], capture_output=True).returncode != 0,
        reason="this system lets nobody make two network namespaces and a link that can be slowed",
    ),
]
