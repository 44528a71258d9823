"""The recipe for Slurm on a cluster of one node: it serves, a worker that dies is started again, and it drains."""

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import client
from baton.cli.launch.placing.ports import HeldPorts
from tests.support.pace import patience
from tests.support.process import ROOT, Process
from tests.support.waiting import until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not all(map(shutil.which, ("slurmctld", "slurmd", "srun", "munged"))), reason="no Slurm here"),
]

_CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000
PartitionName=all Nodes={host} Default=YES State=UP
"""


class Slurm:
    """Run its commands by `run`."""

    def __init__(self, conf: Path):
        self.env = {**os.environ, "SLURM_CONF": str(conf)}

    def run(self, *argv: str, **env: str) -> str:
        done = subprocess.run(argv, env={**self.env, **env}, capture_output=True, text=True, timeout=patience(30))
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout.strip()

    def until(self, condition, what: str):
        return until(condition, what, timeout_s=60, pause_s=0.2)


@pytest.fixture
def slurm(tmp_path) -> Iterator[Slurm]:
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    (tmp_path / "munge.key").write_bytes(os.urandom(1024))
    (tmp_path / "munge.key").chmod(0o600)
    held = HeldPorts()
    control, node = (held.hold("127.0.0.1:0").rpartition(":")[2] for _ in range(2))
    held.release_all()
    conf = tmp_path / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    conf.write_text(_CONF.format(host=host, folder=tmp_path, user=getpass.getuser(), control=control, node=node))
    made, daemons = Slurm(conf), []
    munge = [
        f"--{name}={tmp_path}/munge.{name.partition('-')[0]}"
        for name in ("key-file", "pid-file", "log-file", "seed-file")
    ]
    try:
        daemons.append(
            Process(
                "munged", ["munged", "--force", "--foreground", *munge, f"--socket={tmp_path}/munge.socket"], tmp_path
            )
        )
        made.until((tmp_path / "munge.socket").exists, "munged does not listen")
        daemons.append(Process("slurmctld", ["slurmctld", "-D", "-f", str(conf)], tmp_path))
        daemons.append(Process("slurmd", ["slurmd", "-D", "-f", str(conf)], tmp_path))
        made.until(lambda: "idle" in made.run("sinfo", "--noheader"), "the node is not idle")
        yield made
    finally:
        for daemon in reversed(daemons):
            daemon.stop()


def test_the_slurm_recipe_serves(slurm, tmp_path):
    out, held = tmp_path / "job.out", HeldPorts()
    target = held.hold("127.0.0.1:0")
    held.release_all()
    settings = {
        "MODEL": str(ROOT / "demo" / "target"),
        "PYTHON": sys.executable,
        "DECODE": "2",
        "PORT": target.split(":")[1],
    }
    argv = ["--parsable", f"--chdir={ROOT}", f"--output={out}", "--ntasks=4", "--cpus-per-task=1"]
    job = slurm.run("sbatch", *argv, str(ROOT / "deploy" / "slurm" / "baton.sbatch"), **settings)

    def ready(kind: str) -> list[str]:
        text = out.read_text() if out.exists() else ""
        return re.findall(rf"^ready .*\bpid=(\d+).*{kind}", text, re.MULTILINE)

    slurm.until(lambda: len(ready("role=decode")) == 2 and ready("role=prefill"), "workers are not ready")
    with client.Client(target) as asked:
        slurm.until(lambda: asked.generate("def f(x):", max_tokens=4).choices[0].text, "no answer")
    os.kill(int(ready("role=decode")[0]), 9)
    slurm.until(lambda: len(ready("role=decode")) == 3, "what died was not started again")
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    slurm.until(lambda: not slurm.run("squeue", "--noheader"), "the job does not end")
    assert "JobState=COMPLETED" in slurm.run("scontrol", "show", "job", job)
    text = out.read_text()
    assert text.count("INFO draining") == 4 and "Killed" not in text.partition("gateway INFO draining")[2], text
