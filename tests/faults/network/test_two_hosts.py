"""The commands of docs/two-machines.md, word for word, on two hosts: network namespaces with a link between them, which
is slowed and cut while a stream runs. Both leave the text as it is."""

import os
import re
import subprocess

from tests.support.launch.two_hosts import ALONE, MAKE_TWO_HOSTS, ON_OTHER, two_hosts_can_be_made
from tests.support.pace import patience
from tests.support.process import ROOT

pytestmark = two_hosts_can_be_made
_ANSWER = "--max-tokens 120 --temperature 0"


def commands(name: str) -> list[str]:
    page = (ROOT / "docs" / "two-machines.md").read_text()
    (block,) = re.findall(f"<!-- {name} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    return [line.strip() for line in block.splitlines()]


def script() -> str:
    """One network namespace is the first host, a second one below it the other. `scp` is a copy here."""
    certs, copy, gateway = commands("first")
    prefill, decode = commands("second")
    (request,) = commands("request")
    return f"""
{MAKE_TWO_HOSTS}
mkdir first second; ln -s {ROOT}/demo first/demo; ln -s {ROOT}/demo second/demo
scp() {{ cp "${{@:1:$#-1}}" ../second; }}
ready() {{ until grep -q ^ready $1 2>/dev/null; do kill -0 $2; sleep 0.2; done; }}
cd first
{certs} > /dev/null
{copy}
{gateway} > ../gateway.out 2>&1 & gateway=$!
cd ../second
{ON_OTHER} {prefill} > ../prefill.out 2>&1 & prefill=$!
{ON_OTHER} {decode} > ../decode.out 2>&1 & decode=$!
cd ../first
ready ../prefill.out $prefill; ready ../decode.out $decode; ready ../gateway.out $gateway
{request} {_ANSWER} > ../plain
tc qdisc add dev here root tbf rate 256kbit burst 32kbit latency 400ms
{request} {_ANSWER} > ../slowed
tc qdisc delete dev here root
{request} {_ANSWER} > ../cut & asked=$!
until [ $(wc -c < ../cut) -gt 40 ]; do kill -0 $asked; sleep 0.05; done
ip link set here down; sleep 1.5
kill -0 $asked
ip link set here up
wait $asked
baton top --once --target 10.0.0.1:50052 --tls-ca certs/ca.crt --tls-cert certs/operator.crt --tls-key certs/operator.key >&2
"""


def test_a_gateway_here_and_workers_there(tmp_path):
    env = {**os.environ, "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    # A token in 40 ms: the cut, one second after the request, finds the stream running.
    env["BATON_FAILPOINTS"] = "engine.step=sleep:0.04"
    argv = [*ALONE, "bash", "-c", script()]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=patience(150))
    logs = "".join(path.read_text() for path in tmp_path.glob("*.out"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    plain, slowed, cut = ((tmp_path / name).read_text() for name in ("plain", "slowed", "cut"))
    assert len(plain) > 80 and slowed == plain and cut == plain
    assert "decode 10.0.0.2:50062" in done.stderr and "prefill 10.0.0.2:50061" in done.stderr
