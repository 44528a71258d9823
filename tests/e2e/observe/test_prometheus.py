"""A real Prometheus, with the rules of deploy/, scrapes a real stack under load: every query of every dashboard returns
data, no alert fires, and exemplars lead to traces that arrived."""

import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from urllib.parse import urlencode
from urllib.request import urlopen

import grpc
import pytest
import yaml

from tests.support.observe.deployed import ALL_RULES, DASHBOARDS, DEPLOY, panels
from tests.support.pace import patience
from tests.support.process import Process
from tests.support.waiting import until

pytestmark = pytest.mark.long
SCRAPE_S = 1
LOAD_S = 12
# Series of GPUs, of workers with several ranks and of certificates, which this stack has none of.
ELSEWHERE = "baton_gpu_|baton_rank_|baton_certificate_"
NUM_WATCHES = 40  # more than one caller may have open
_PORT = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])"


class Prometheus:
    def __init__(self, port: int):
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def ask(self, path: str, **parameters):
        with urlopen(f"{self._url}{path}?{urlencode(parameters)}", timeout=10) as reply:
            return json.load(reply)["data"]

    def query(self, text: str) -> list[dict]:
        return self.ask("query", query=text)["result"]

    def until(self, is_true, timeout_s: float = 30) -> None:
        def answers() -> bool:
            with suppress(OSError):
                return is_true()

        until(answers, "Prometheus does not reach it", timeout_s, pause_s=0.2)


def config(stack) -> dict:
    """That of deploy/, but for addresses and intervals, and for what is not ours."""
    made = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    made["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": "1s"}
    made["rule_files"] = [str(DEPLOY / "prometheus" / "rules" / "*.yml")]
    processes = {"baton-gateway": stack.gateways, "baton-prefill": stack.prefill, "baton-decode": stack.decode}
    made["scrape_configs"] = [job for job in made["scrape_configs"] if job["job_name"] in processes]
    for job in made["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": [process.ready()["admin"] for process in processes[job["job_name"]]]}]
    return made


def watch_health_too_often(target: str) -> None:
    """Until the guard denies a call: a panel shows how many there were."""
    with grpc.insecure_channel(target) as channel:
        watches = [channel.unary_stream("/grpc.health.v1.Health/Watch")(b"") for _ in range(NUM_WATCHES)]
        deadline = time.monotonic() + patience(10)
        while not any(watch.done() for watch in watches):
            assert time.monotonic() < deadline, "nothing was denied"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def prometheus(stack, client, prompts, tmp_path_factory):
    """After some load."""
    assert shutil.which("prometheus"), "prometheus is missing: install Debian's package prometheus"
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config(stack)))
    port = int(subprocess.run([sys.executable, "-c", _PORT], capture_output=True, text=True, check=True).stdout)
    argv = [
        "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage", "--log.level=error",
    ]  # fmt: skip
    process, server = Process("prometheus", argv, folder), Prometheus(port)
    try:
        server.until(lambda: len(server.query("up == 1")) == len(stack.processes))
        watch_health_too_often(stack.target)
        ends_at, shared = time.monotonic() + LOAD_S, prompts(128)
        while time.monotonic() < ends_at:
            client.generate(shared + prompts(100), temperature=0.0, max_tokens=40, ignore_eos=True)
        time.sleep(3 * SCRAPE_S)
        yield server
    finally:
        process.terminate()
        process.stop()


@pytest.mark.parametrize("path", DASHBOARDS, ids=[path.stem for path in DASHBOARDS])
def test_every_panel_has_data(prometheus, path):
    empty = []
    for panel in panels(path):
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "15s").replace("$tenant", ".+")
            query = query.replace("$model", ".*").replace("$namespace", ".*")
            found = prometheus.query(query)
            if not found and not re.search(ELSEWHERE, query):
                empty.append(f"{panel['title']}: {query}")
    assert not empty, "\n".join(empty)


def test_rules_are_evaluated_and_none_fires(prometheus):
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(ALL_RULES)
    prometheus.until(lambda: prometheus.query("baton:ttft_misses:ratio6h"))
    assert not [rule["name"] for rule in rules if rule["health"] == "err" or rule.get("state") == "firing"]


def test_metrics_agree_with_what_was_asked(prometheus):
    """The parts of a request's time add up in Prometheus too, over everything that was answered."""
    (phases,) = prometheus.query("sum(baton_phase_seconds_sum)")
    (served,) = prometheus.query("sum(baton_requests_total)")
    (counted,) = prometheus.query('sum(baton_phase_seconds_count{phase="tokenize"})')
    assert float(phases["value"][1]) > 0 and served["value"][1] == counted["value"][1]
    (holders,) = prometheus.query('sum(baton_kv_blocks{job="baton-decode"})')
    assert float(holders["value"][1]) == 160


@pytest.mark.parametrize("name", ["ttft", "tpot", "itl", "e2e", "phase"])
def test_exemplars_lead_to_traces(prometheus, receiver, name):
    now = time.time()
    found = prometheus.ask("query_exemplars", query=f"baton_{name}_seconds_bucket", start=now - 60, end=now)
    trace_ids = {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}
    assert trace_ids
    receiver.wait_for(lambda spans: trace_ids & {span.trace_id for span in spans})
