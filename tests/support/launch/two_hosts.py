"""Two network namespaces that stand for two hosts: how a test is alone in one, and the mark of those that take both."""

import subprocess

import pytest

ALONE = ("unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
LINK = (
    "ip link add here type veth peer name there && tc qdisc add dev here root tbf rate 1mbit burst 32kbit latency 400ms"
)
ON_OTHER = "nsenter --net=/proc/$other/ns/net"  # what follows it runs on the other host
# Of a bash script that is ALONE: makes the other host, 10.0.0.2, and the link `here` to it from this one, 10.0.0.1.
MAKE_TWO_HOSTS = f"""
set -e
ip link set lo up
unshare --net sleep infinity & other=$!
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link add here type veth peer name there netns $other
ip address add 10.0.0.1/24 dev here; ip link set here up
{ON_OTHER} sh -c 'ip address add 10.0.0.2/24 dev there; ip link set there up; ip link set lo up'
"""
two_hosts_can_be_made = [
    pytest.mark.long,
    pytest.mark.skipif(
        subprocess.run([*ALONE, "sh", "-c", LINK], capture_output=True).returncode != 0,
        reason="this system lets nobody make two network namespaces and a link that can be slowed",
    ),
]
