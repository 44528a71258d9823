"""Traces, objectives and workloads: what is read, what is drawn, and what is refused in one line."""

import dataclasses
import gzip
import itertools
import json
import random
import time

import pytest

from baton.loadgen.trace import TraceEntry, TraceError, read_trace
from baton.loadgen.workload import (
    FIRST_TOKEN,
    WORKLOADS,
    Job,
    Shape,
    arrivals,
    drawn,
    fitted,
    from_trace,
    prompt_ids,
    shares,
)
from baton.planning.workload import span_names
from baton.service.slo import Slo, parse_slo
from kvtransfer.naming import SPAN_TOKENS

MOONCAKE = '{"timestamp": 500, "input_length": 1000, "output_length": 5, "hash_ids": [3, 9]}\n'
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
)


def write(folder, name: str, text: str):
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_mooncake_trace_is_read_in_order(tmp_path, name):
    later = MOONCAKE.replace("500", "2500")
    assert read_trace(write(tmp_path, name, later + "\n" + MOONCAKE)) == [
        TraceEntry(0.0, 1000, 5, (3, 9)),
        TraceEntry(2.0, 1000, 5, (3, 9)),
    ]


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_an_azure_trace_is_read(tmp_path, name):
    first, second = read_trace(write(tmp_path, name, AZURE))
    assert (first.at_s, first.num_prompt, first.num_output, first.hash_ids) == (0.0, 4808, 10, ())
    assert second.at_s == pytest.approx(0.052) and second.num_prompt == 3180


def test_azure_stamps_are_utc(tmp_path, monkeypatch):
    """Read where clocks are put forward and back between them: they are 3,601 s and 1 s apart even so."""
    stamps = ("2024-03-31 01:59:59", "2024-03-31 03:00:00", "2024-10-27 02:59:59", "2024-10-27 03:00:00")
    text = AZURE.splitlines()[0] + "".join(f"\n{stamp}.0000000,5,5" for stamp in stamps)
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        first, second, third, fourth = read_trace(write(tmp_path, "t.csv", text))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert (second.at_s - first.at_s, fourth.at_s - third.at_s) == (3601, 1)


@pytest.mark.parametrize("digits", ["", ".1", ".123456", ".1234567"])
@pytest.mark.parametrize(("zone", "hours"), [("", 0), ("Z", 0), ("+00:00", 0), ("+02:00", -2)])
def test_azure_stamps_have_any_fraction_and_zone(tmp_path, digits, zone, hours):
    """Of seven digits the zone was cut off, of one digit half of it."""
    stamps = f"2024-05-10 00:00:00,5,5\n2024-05-10 12:00:00{digits}{zone},5,5\n"
    _, second = read_trace(write(tmp_path, "t.csv", AZURE.splitlines()[0] + "\n" + stamps))
    assert second.at_s == pytest.approx(3600 * (12 + hours) + float(f"0{digits}"), abs=1e-5)


def test_hash_ids_of_any_size_are_names(tmp_path):
    """Some traces have whole digests as ids."""
    (entry,) = read_trace(write(tmp_path, "t.jsonl", MOONCAKE.replace("[3, 9]", f"[{2**127 + 5}, {-(2**300)}]")))
    names = span_names(entry, 0)
    assert len(names) == entry.num_prompt // SPAN_TOKENS == len(set(names))
    other = span_names(dataclasses.replace(entry, hash_ids=(2**127 + 6, -(2**300))), 0)
    assert not set(names[: 1024 // SPAN_TOKENS]) & set(other)


@pytest.mark.parametrize(
    "name, text, named",
    [
        ("t.jsonl", "", "no requests"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("t.jsonl", MOONCAKE + "{oops\n", "line 2"),
        ("t.jsonl", '{"timestamp": 1, "input_length": 3}\n', "no 'output_length'"),
        ("t.jsonl", MOONCAKE.replace("1000", "0"), "0 prompt"),
        ("t.jsonl", "[1]\n", "line 1"),
        ("t.csv", "a,b\n1,2\n", "no column TIMESTAMP"),
        ("t.csv", AZURE + "yesterday,1,2\n", "line 4"),
        ("t.txt", "x", ".jsonl"),
        ("t.jsonl.gz", None, "cannot be read"),
    ],
)
def test_a_bad_trace_is_named_in_one_line(tmp_path, name, text, named):
    path = tmp_path / name
    path.write_bytes(b"not gzip") if text is None else path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(path) in str(caught.value) and named in str(caught.value) and "\n" not in str(caught.value)


def test_a_trace_that_is_not_there(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "missing.csv")


def test_objectives_are_parsed_and_compared():
    assert parse_slo("ttft=300ms,tpot=0.05s") == Slo(0.3, 0.05)
    assert str(parse_slo("ttft=300ms, e2e=2s")) == "ttft=300ms,e2e=2000ms"
    assert Slo(0.3, 0.05).met(0.3, None, 9) and not Slo(0.3, 0.05).met(0.2, 0.06, 9)
    for wrong in ("", "ttft", "ttft=300", "ttft=-1ms", "speed=3s", "ttft=1s,ttft=2s", "ttft=1ems", "ttft=1e999s"):
        with pytest.raises(ValueError):
            parse_slo(wrong)


@pytest.mark.parametrize("text", ["e2e=1000s", "ttft=1234.5678ms", "tpot=0.00001ms", "e2e=2e12s"])
def test_an_objective_is_read_as_it_was_written(text):
    """A report has its words alone."""
    assert parse_slo(str(parse_slo(text))) == parse_slo(text)


def test_equal_hash_ids_are_equal_prefixes_and_nothing_else_is():
    jobs = from_trace(
        [TraceEntry(0, 1200, 4, (1, 2, 3)), TraceEntry(1, 1100, 4, (1, 2, 9)), TraceEntry(2, 600, 4)], 1.0, 1.0, None
    )
    a, b, c = (prompt_ids(job, 1000, seed=0) for job in jobs)
    assert [len(ids) for ids in (a, b, c)] == [1200, 1100, 600]
    shared = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    assert 1024 <= shared < 1030 and c[:20] != a[:20]
    assert a == prompt_ids(jobs[0], 1000, seed=0) != prompt_ids(jobs[0], 1000, seed=1)
    assert min(a) >= FIRST_TOKEN and max(a) < 1000


def test_scales_keep_what_is_shared():
    jobs = from_trace([TraceEntry(10, 1024, 100, (1, 2)), TraceEntry(20, 1536, 100, (1, 2, 5))], 2.0, 0.125, None)
    assert [job.at_s for job in jobs] == [5, 10] and [job.num_prompt for job in jobs] == [128, 192]
    a, b = (prompt_ids(job, 500, 0) for job in jobs)
    assert a == b[:128]


@pytest.mark.parametrize("kind", ["poisson", "constant", "burst"])
def test_arrivals_come_at_their_rate(kind):
    times = list(itertools.islice(arrivals(kind, 20.0, random.Random(1)), 4000))
    assert times == sorted(times) and 4000 / times[-1] == pytest.approx(20, rel=0.15)


def test_jobs_are_drawn_around_the_means_and_cut_to_the_context():
    jobs = drawn(random.Random(0), iter(range(1000)), 400, Shape(100, 8))
    assert 95 < sum(job.num_prompt for job in jobs) / 400 < 105
    kept, num_cut = fitted([Job(0, 0, 5000, 900), Job(1, 0, 10, 10)], 1024)
    assert num_cut == 1 and kept[1] == Job(1, 0, 10, 10) and kept[0].num_prompt + kept[0].num_output < 1024
    assert sorted(job.index for part in shares(jobs, 3) for job in part) == list(range(400))


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_of_a_workload_share_its_beginning(name):
    shape = WORKLOADS[name]
    first, second = (prompt_ids(job, 1000, 1) for job in drawn(random.Random(0), iter(range(9)), 2, shape))
    num = min(shape.shared, len(first), len(second))
    assert first[:num] == second[:num] and (num > 0 or first[:20] != second[:20])


@pytest.mark.parametrize("name", [name for name, shape in WORKLOADS.items() if shape.shared])
def test_what_a_request_shares_does_not_vary(name):
    """No prompt is its beginning alone: it would be found whole in the cache, and say nothing of a request."""
    shape = WORKLOADS[name]
    jobs = drawn(random.Random(0), iter(range(400)), 400, shape)
    own = [job.num_prompt - shape.shared for job in jobs]
    mean = shape.prompt - shape.shared
    assert min(own) >= 0.74 * mean and max(own) <= 1.26 * mean and 0.9 * mean < sum(own) / 400 < 1.1 * mean
    longest = max((prompt_ids(job, 1000, 0) for job in jobs), key=len)
    assert sum(prompt_ids(job, 1000, 0) == longest[: job.num_prompt] for job in jobs) == 1


def test_the_shipped_traces_can_be_read():
    from pathlib import Path

    folder = Path(__file__).parents[2] / "bench" / "traces"
    names = sorted(path.name for path in folder.glob("*.*") if path.suffix in (".jsonl", ".csv"))
    assert names == ["arrivals.csv", "conversation.jsonl"]
    conversation = read_trace(folder / "conversation.jsonl")
    assert any(entry.hash_ids for entry in conversation) and len(conversation) >= 500
    assert len(read_trace(folder / "arrivals.csv")) >= 500
    json.loads((folder / "conversation.jsonl").read_text().splitlines()[0])
