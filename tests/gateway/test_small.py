"""The small parts: timing, lines, index feeds, folders, admin, import."""

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from baton.sampling_params import SAMPLING_DEFAULTS
from baton.service.settings import SettingsError
from baton.v1 import worker_pb2 as pb
from gateway.config.settings import GatewaySettings
from gateway.model.model_folder import Defaults, read_folder
from gateway.prefix.cluster_secret import derived_secret, fingerprint, read_secret
from gateway.prefix.memory_index import MemoryIndex
from gateway.request.timing import Measured, Stamps, timing
from tests.support.process import ROOT


def test_import_loads_no_torch():
    code = "import sys, gateway.__main__, gateway.app, gateway.prefix.redis_index; print(sorted(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    for module in ("torch", "transformers", "numpy", "baton.engine"):
        assert f"'{module}'" not in ran.stdout, module


# ---- timing ----

STAMPS = Stamps(
    received=10.0,
    tokenized=10.1,
    routed=10.3,
    granted=10.6,
    prefill_sent=10.7,
    first_sent=12.0,
    second_sent=13.0,
    last_sent=14.0,
)


def test_phases_add_up():
    decode = pb.DecodeReport(kv_wait_s=0.2, decode_queue_s=0.1, first_step_s=0.3)
    result = timing(STAMPS, Measured(0.2, 0.5, 0.4, 0.1, decode), 11)
    phases = (result.tokenize_s, result.route_s, result.admit_s, result.prefill_queue_s, result.prefill_s)
    assert phases == pytest.approx((0.1, 0.2, 0.3, 0.3, 0.5))
    assert sum(phases) + result.first_delivery_s == pytest.approx(result.ttft_s) == pytest.approx(2.0)
    second = (result.kv_wait_s, result.decode_queue_s, result.first_step_s, result.second_delivery_s)
    assert second == pytest.approx((0.2, 0.1, 0.3, 0.4))
    assert result.total_s == pytest.approx(4.0) and result.tpot_s == pytest.approx(0.2)
    assert (result.transfer_s, result.transfer_hidden_s) == pytest.approx((0.4, 0.3))


def test_a_worker_s_clock_may_run_fast():
    """A measured time is cut to the gap that bounds it: no phase is negative, and the sum is right."""
    decode = pb.DecodeReport(kv_wait_s=5.0, decode_queue_s=5.0, first_step_s=-1.0)
    result = timing(STAMPS, Measured(100.0, 100.0, 0.1, 9.0, decode), 2)
    assert (result.prefill_queue_s, result.prefill_s, result.first_delivery_s) == pytest.approx((1.4, 0, 0))
    assert (result.kv_wait_s, result.decode_queue_s, result.first_step_s, result.second_delivery_s) == (1.0, 0, 0, 0)
    assert result.transfer_hidden_s == 0


def test_one_token():
    result = timing(Stamps(1.0, 1.1, 1.2, 1.3, 1.3, first_sent=2.0, last_sent=2.0), Measured(), 1)
    assert result.ttft_s == pytest.approx(1.0) and result.tpot_s == result.second_delivery_s == 0


# ---- the embedded index ----


async def test_the_embedded_index():
    spans = [hashlib.sha256(bytes([i])).digest() for i in range(6)]
    index, asked = MemoryIndex(), []
    index.join(b"a", lambda: asked.append("a"))
    index.join(b"b", lambda: asked.append("b"))
    index.apply(b"a", pb.BlockEvents(seq=0, snapshot=True, sealed=spans[:4]))
    index.apply(b"b", pb.BlockEvents(seq=0, snapshot=True))
    index.apply(b"b", pb.BlockEvents(seq=1, sealed=spans[:2]))
    assert await index.lookup(spans) == {b"a": 4, b"b": 2}
    index.apply(b"a", pb.BlockEvents(seq=1, evicted=spans[1:2]))
    assert await index.lookup(spans) == {b"a": 1, b"b": 2}
    assert asked == ["a", "b"]
    index.apply(b"b", pb.BlockEvents(seq=5, sealed=spans))
    assert asked == ["a", "b", "b"] and (await index.lookup(spans))[b"b"] == 2
    index.drop(b"a")
    index.apply(b"a", pb.BlockEvents(seq=2, sealed=spans))
    assert await index.lookup(spans) == {b"b": 2}
    assert await index.lookup([]) == {}


# ---- folders, secrets, settings ----


def test_defaults_are_the_folder_s(folder):
    read = read_folder(folder)
    assert (read.name, read.context, read.vocab_size, read.eos_ids) == ("fake", 1024, 400, {0, 4})
    assert read.defaults == Defaults() and read.defaults.sampling["temperature"] == 0


@pytest.mark.parametrize(
    "generation, expected",
    [
        ({}, Defaults()),
        ({"do_sample": True}, Defaults(SAMPLING_DEFAULTS | {"temperature": 1.0})),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20},
            Defaults(SAMPLING_DEFAULTS | {"temperature": 0.6, "top_k": 20}),
        ),
        ({"temperature": 0.6, "top_p": 0.8}, Defaults(SAMPLING_DEFAULTS | {"top_p": 0.8})),
        (
            {"max_new_tokens": 7, "repetition_penalty": 1.1},
            Defaults(SAMPLING_DEFAULTS | {"repetition_penalty": 1.1}, max_tokens=7),
        ),
    ],
)
def test_generation_config(folder, tmp_path, generation, expected):
    copy(folder, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_folder(tmp_path).defaults == expected


@pytest.mark.parametrize(
    ("eos_token", "ends"), [("<|end|>", {0, 3, 4}), ({"content": "<|end|>"}, {0, 3, 4}), ("</s>", {0, 3})]
)
async def test_an_answer_ends_with_the_tokenizers_own_end_too(folder, tmp_path, cluster, eos_token, ends):
    """ChatML finetunes of Llama and Mistral name it in tokenizer_config.json alone."""
    copy(folder, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3]}))
    of_tokenizer = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": eos_token}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    async with cluster(model=tmp_path) as c:
        assert c.fleet.model.eos_ids == ends


def copy(folder, to) -> None:
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    "name, content",
    [*(("config.json", content) for content in (None, "{", "{}", "[]")), ("tokenizer.json", None)],
)
def test_a_broken_folder_is_named(folder, tmp_path, name, content):
    copy(folder, tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SettingsError, match=name) as caught:
        read_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_chat_template_file_goes_first(folder, tmp_path):
    copy(folder, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ 1 }}")
    assert read_folder(tmp_path).chat_template == "{{ 1 }}"
    (tmp_path / "chat_template.jinja").unlink()
    named = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert read_folder(tmp_path).chat_template == "d"


def test_secrets(tmp_path):
    path = tmp_path / "secret"
    path.write_text("a secret of enough bytes\n")
    secret = read_secret(path)
    assert fingerprint(secret) != fingerprint(derived_secret(b"i" * 32)) and secret[:8] not in fingerprint(secret)
    path.write_text("short")
    for broken in (path, tmp_path / "missing"):
        with pytest.raises(SettingsError, match="--cluster-secret"):
            read_secret(broken)


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"prefill_workers": ("a:1",), "decode_workers": ("a:1",)}, "a:1"),
        ({"listen": "0.0.0.0:50051", "insecure": True}, "--cluster-secret"),
        ({"max_unread_tokens": 0}, "--max-unread-tokens"),
        ({"decode_workers": ("localhost:70000",)}, "^--decode-workers: 'localhost:70000' is not HOST:PORT$"),
        ({"decode_workers": ("decode",)}, "^--decode-workers: 'decode' is not HOST:PORT$"),
        ({"decode_workers": ("::1:50062",)}, "^--decode-workers: '::1:50062' is not HOST:PORT: .* takes brackets"),
        ({"decode_workers": ("fe80::1",)}, "^--decode-workers: 'fe80::1' is not HOST:PORT: .* takes brackets"),
        ({"prefill_workers": ("decode..svc:50062",)}, "^--prefill-workers: 'decode..svc:50062' .* no host can have"),
        ({"prefill_workers": (f"{'p' * 64}.svc:50061",)}, "^--prefill-workers: .* no host can have that name$"),
        ({"model_root": Path("/no/such")}, "^--model-root /no/such: no such folder$"),
        ({"max_queued_requests": -1}, "^--max-queued-requests -1: must be 0 or more$"),
        ({"max_queue_wait_s": -1.0}, "^--max-queue-wait-s -1.0: must be 0 or more$"),
        ({"max_queue_wait_s": math.nan}, "^--max-queue-wait-s nan: must be 0 or more$"),
        ({"drain_grace_s": -5.0}, "^--drain-grace-s -5.0: must be 0 or more$"),
        ({"drain_grace_s": math.nan}, "^--drain-grace-s nan: must be 0 or more$"),
        ({"default_timeout_s": math.nan}, "^--default-timeout-s nan: must be over 0$"),
        ({"max_timeout_s": math.nan}, "^--max-timeout-s nan: must be over 0$"),
    ],
)
def test_settings_that_cannot_work(tmp_path, fields, named):
    with pytest.raises(ValueError, match=named):
        GatewaySettings(**{"model": tmp_path, "decode_workers": ("d:1",), **fields})
