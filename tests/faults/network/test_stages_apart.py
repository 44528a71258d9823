"""A worker whose second stage is on another host: two network namespaces with a link between them, which is cut while
streams run. The worker ends with the reason, so does the rank, and every stream goes on in another worker as if nothing
had been."""

import os
import subprocess

from tests.support.launch.two_hosts import ALONE, MAKE_TWO_HOSTS, ON_OTHER, two_hosts_can_be_made
from tests.support.pace import patience
from tests.support.process import ROOT

pytestmark = two_hosts_can_be_made

TLS = "--tls-ca certs/ca.crt --tls-cert certs/{0}.crt --tls-key certs/{0}.key"
WORKER = f"python -m decode_worker --model target --threads 1 --gateways 10.0.0.1:50052 {TLS.format('decode')}"
ASK = "baton generate 'def read_lines(path):' --target 10.0.0.1:50051 --tls-ca certs/ca.crt --api-key-file certs/api-key --max-tokens 120 --temperature 0"
SCRIPT = f"""
{MAKE_TWO_HOSTS}
ln -s {ROOT}/demo/target target
baton certs --out certs --host 10.0.0.1 > /dev/null
ready() {{ until grep -q ^ready $1.out; do kill -0 $2; sleep 0.2; done; }}
python -m gateway --model target --listen 10.0.0.1:50051 --fleet-listen 10.0.0.1:50052 --worker-networks 10.0.0.1/32 \\
    --credentials certs/credentials.toml --cluster-secret certs/cluster-secret {TLS.format("gateway")} > gateway.out 2>&1 &
{ON_OTHER} baton rank --leader 10.0.0.1:50070 --model target --threads 1 --kv-host 10.0.0.2 \\
    {TLS.format("rank")} > rank.out 2>&1 & rank=$!
{WORKER} --listen 10.0.0.1:50061 --pipeline-parallel 2 --remote-stages 1 --rank-listen 10.0.0.1:50070 > stages.out 2>&1 & stages=$!
ready stages $stages
{ASK} > plain
{WORKER} --listen 10.0.0.1:50062 > whole.out 2>&1 & whole=$!
ready whole $whole
sleep 1
asked=
for each in 1 2 3 4; do {ASK} > cut$each & asked="$asked $!"; done
for each in 1 2 3 4; do until [ $(wc -c < cut$each) -gt 40 ]; do sleep 0.05; done; done
ip link set here down
for each in $asked; do wait $each; done
ended=0; wait $stages || ended=$?; [ $ended = 1 ]
ended=0; wait $rank || ended=$?; [ $ended = 1 ]
"""


def test_the_link_between_two_stages_is_cut(tmp_path):
    env = {**os.environ, "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env["BATON_FAILPOINTS"] = "engine.step=sleep:0.04"  # a token in 40 ms: the cut finds the streams running
    argv = [*ALONE, "bash", "-c", SCRIPT]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=patience(150))
    logs = {path.stem: path.read_text() for path in tmp_path.glob("*.out")}
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    plain, *cut = ((tmp_path / name).read_text() for name in ("plain", "cut1", "cut2", "cut3", "cut4"))
    assert len(plain) > 80 and cut == [plain] * 4
    assert "was not heard for 5.0 s, so this worker ends with all its ranks" in logs["stages"]
    assert "the worker at 10.0.0.1:50070 has ended, or its connection" in logs["rank"]
    assert "num_attempts=2" in logs["gateway"]
