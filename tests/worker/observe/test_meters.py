"""A worker's counters, over two real workers: the blocks that moved, the prefix that was here, and gauges that add
up."""

import json
import threading
import time
from dataclasses import replace
from typing import Any, cast
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from baton.service.observe.metrics import Metrics
from baton.worker.legs.leg import Leg
from baton.worker.observe import meters
from baton.worker.observe.meters import WorkerMeters
from tests.support.models import make_model
from tests.support.pace import patience
from tests.support.stack import Stack
from tests.support.waiting import until
from tests.support.worker.key_paths import DONE, KEY, REPORT


def samples(address: str) -> dict[tuple, float]:
    text = urlopen(f"http://{address}/metrics", timeout=10).read().decode()
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "model_name")): sample.value
        for family in parse(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def stack(fork_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("meters")
    model = make_model(folder / "model")
    options = ("--num-blocks", "96", "--threads", "1", "--transports", "shm")
    with Stack(
        model, folder / "logs", options=options, gateway_options=("--split", "always"), fork_server=fork_server
    ) as stack:
        yield stack


def test_a_handoff_is_counted_where_the_kv_was_pulled_to(stack):
    from tests.support.client import Client

    client = Client(stack.target)
    prompt = [10 + index % 200 for index in range(200)]
    for _ in range(2):
        client.generate(prompt, temperature=0.0, max_tokens=4, ignore_eos=True)
    client.close()
    decode, prefill = (samples(process.ready()["admin"]) for process in (stack.decode[0], stack.prefill[0]))
    assert decode["baton_transfer_bytes_total", "shm"] > 0
    assert decode["baton_transfer_seconds_count",] == decode["baton_transfer_hidden_ratio_count",] == 2
    assert not any(name == "baton_prefix_tokens_total" for name, *_ in decode), "the prompt was just read elsewhere"
    assert prefill["baton_prefix_tokens_total", "local"] >= 128
    for seen in (decode, prefill):
        assert sum(value for name, value in seen.items() if name[0] == "baton_kv_blocks") == 96
        assert seen["baton_memory_bytes", "weights"] > 0 and seen["baton_memory_bytes", "kv"] > 0
        assert seen["baton_memory_bytes", "process"] > seen["baton_memory_bytes", "weights"]
        assert seen["baton_sequences_running",] == seen["baton_sequences_waiting",] == 0


def test_what_was_pulled_is_not_local_too(monkeypatch):
    """A prefill's cached tokens are those that it has pulled as well."""
    monkeypatch.setattr(meters, "Cost", lambda engine: None)
    counted = WorkerMeters(Metrics("tiny"), cast(Any, None), cast(Any, None), None, {})
    for num_cached, num_pulled, is_whole in ((192, 128, True), (192, 0, False), (64, 64, False)):
        leg = Leg(KEY, cast(Any, None))
        leg.prefill_done, leg.num_pulled_tokens = replace(DONE, num_cached_tokens=num_cached), num_pulled
        leg.fetch_report = REPORT if is_whole else None  # none of one that broke off
        counted.ended(leg)
    taken = Leg(KEY, cast(Any, None))  # of a prompt that another worker has read
    taken.fetch_report = REPORT
    counted.ended(taken)
    found = {tier: counted._prefix(tier)._value.get() for tier in ("local", "pulled")}
    assert found == {"local": 64 + 192, "pulled": 128 + 64}


def test_a_worker_says_whether_it_is_ready(stack):
    for process in stack.workers:
        assert b'"state": "serving"' in urlopen(f"http://{process.ready()['admin']}/readyz", timeout=10).read()


def test_utilisation_is_seen_under_load_alone(stack):
    """Some of what the device can do while there is work, nothing afterwards."""
    from tests.support.client import Client

    client, admin = Client(stack.target), stack.decode[0].ready()["admin"]
    ends_at = time.monotonic() + 3
    while time.monotonic() < ends_at:
        client.generate([10 + index for index in range(100)], temperature=0.0, max_tokens=60, ignore_eos=True)
    seen = samples(admin)
    client.close()
    assert seen["baton_utilisation", "bandwidth"] > 0 and seen["baton_utilisation", "flops"] > 0
    deadline = time.monotonic() + patience(30)
    while samples(admin)["baton_utilisation", "flops"]:
        assert time.monotonic() < deadline
        time.sleep(0.5)


def tables_of(stack, role: str) -> dict[str, int]:
    """As the gateway's fleet page has them."""
    page = json.loads(urlopen(f"http://{stack.gateways[0].ready()['admin']}/fleet.json", timeout=10).read())
    (view,) = (view for view in page["workers"]["workers"] if view["role"] == role)
    return view["load"]["tables"]


def test_tables_fill_and_empty(stack):
    """Each entry that a request makes is seen while it runs, and gone when it has ended."""
    from tests.support.client import Client

    client, admin = Client(stack.target), stack.decode[0].ready()["admin"]
    prompt = [10 + index for index in range(150)]

    def ask():
        while not stop.is_set():
            client.generate(prompt, temperature=0.0, max_tokens=100, ignore_eos=True)

    stop, thread = threading.Event(), threading.Thread(target=ask)
    thread.start()
    until(lambda: tables_of(stack, "decode").get("keys_running"))
    until(lambda: samples(admin)["baton_table_entries", "token_records"] == 1)
    until(lambda: samples(admin)["baton_table_entries", "engine_keys"] == 1)
    stop.set()
    thread.join()
    client.close()
    for role in ("prefill", "decode"):
        until(lambda role=role: not any(tables_of(stack, role).values()))
        assert {"keys", "leases", "tickets", "fetches", "kv_connections", "unwritten"} <= set(tables_of(stack, role))
    assert not any(value for name, value in samples(admin).items() if name[0] == "baton_table_entries")
