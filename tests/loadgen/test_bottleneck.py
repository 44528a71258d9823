"""`baton bench` against a gateway that spends its time in one place: the sentence names it everywhere."""

import html
import json

import pytest

from baton.cli.main import main
from baton.service.observe.bottleneck import LEVERS, SENDER_LEVER
from tests.support.gateway.fake_gateway import FakeGateway, serving_gateway

CLOSED = ("--closed", "4", "--num-requests", "12")
SHORT = ("--prompt-tokens", "16", "--output-tokens", "4")
# What bounds the run: where the gateway spends its time, the load, and a word of the evidence.
RUNS = {
    "prefill queue": (dict(delay_s=0.3, phase="prefill_queue"), (*CLOSED, *SHORT), "prefill worker"),
    "prefill compute": (dict(delay_s=0.3, phase="prefill"), (*CLOSED, *SHORT), "reading prompts"),
    "transfer": (dict(delay_s=0.3, phase="kv_wait"), (*CLOSED, *SHORT), "still on its way"),
    "decode bandwidth": (
        dict(step_s=0.02),
        (*CLOSED, "--prompt-tokens", "16", "--output-tokens", "20"),
        "writing tokens",
    ),
    # More at once than can be sent within 5 ms of one another.
    "client": (dict(), ("--rate", "1000000", "--num-requests", "400", *SHORT), "late at p99"),
}


@pytest.mark.parametrize("bottleneck", RUNS)
def test_the_sentence_names_where_the_time_went(bottleneck, tmp_path, capsys):
    times, load, evidence = RUNS[bottleneck]
    with serving_gateway(FakeGateway(**times)) as target:
        status = main(["bench", "--target", target, *load, "--seed", "1", "--out", str(tmp_path / "run")])
    said = capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    sentence = summary["bound"]["sentence"]
    assert summary["bound"]["name"] == bottleneck and evidence in sentence
    assert (SENDER_LEVER if bottleneck == "client" else LEVERS[bottleneck]) in sentence
    assert said.splitlines()[-2].endswith(sentence)
    assert html.escape(sentence) in (tmp_path / "run" / "report.html").read_text()
    assert status == (1 if bottleneck == "client" else 0)
