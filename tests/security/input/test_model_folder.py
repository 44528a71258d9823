"""Malicious model folders (H13): each is refused in one line that names the file, and nothing in it
runs."""

import json
import os
import pickle
import struct
from pathlib import Path

import pytest

from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.models.loader import load_model
from baton.service.settings import SettingsError
from gateway.model.model_folder import read_folder
from gateway.text.templates import ChatMessage, ChatTemplate, TemplateFailed
from gateway.text.tokenizer import Tokenizer
from tests.support.model_folders.families import make_folder


class Bomb:
    """A class with a side effect when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def marker(tmp_path) -> Path:
    return tmp_path / "it-ran"


@pytest.fixture
def folder(tmp_path) -> Path:
    make_folder(tmp_path / "model", "qwen3")
    return tmp_path / "model"


def parts(path: Path) -> tuple[dict, bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def store(path: Path, header: dict | bytes, body: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)


def pickled(path: Path, marker: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb(marker)))


def no_safetensors(path, marker, name):
    path.unlink()
    pickled(path.with_name(name), marker)


def first(header: dict) -> str:
    return next(name for name in header if name != "__metadata__")


def change(path, edit) -> None:
    header, body = parts(path)
    edit(header, body)
    store(path, header, body)


def overlap(header, body):
    names = [name for name in header if name != "__metadata__"]
    header[names[0]]["data_offsets"] = [offset + 2 for offset in header[names[0]]["data_offsets"]]


def set_first(**values):
    return lambda path, marker: change(path, lambda header, body: header[first(header)].update(values))


ATTACKS = {
    "pytorch_model.bin alone": lambda path, marker: no_safetensors(path, marker, "pytorch_model.bin"),
    "model.pt alone": lambda path, marker: no_safetensors(path, marker, "model.pt"),
    "a pickle called safetensors": pickled,
    "a header of 2^63 bytes": lambda path, marker: store(path, b"{}", b"", 2**63),
    "a header of 200 MB": lambda path, marker: store(path, b"{}", b"", 200 << 20),
    "a header beyond the file": lambda path, marker: store(path, b"{}", b"", 10_000),
    "no JSON": lambda path, marker: store(path, b"\x80\x04K\x01.", b""),
    "nested JSON": lambda path, marker: store(path, b"[" * 100_000, b""),
    "overlapping tensors": lambda path, marker: change(path, overlap),
    "offsets beyond the file": set_first(data_offsets=[0, 1 << 50]),
    "negative offsets": set_first(data_offsets=[-8, 8]),
    "offsets backwards": set_first(data_offsets=[8, 0]),
    "a shape beyond 64 bits": set_first(shape=[2**40, 2**40]),
    "a negative shape": set_first(shape=[-1, 8]),
    "an unknown dtype": set_first(dtype="OBJECT"),
    "something behind the end": lambda path, marker: path.write_bytes(path.read_bytes() + pickle.dumps(Bomb(marker))),
    "a hole in front": lambda path, marker: store(path, parts(path)[0], bytes(64) + parts(path)[1]),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_weights_are_refused_and_run_no_code(folder, marker, attack):
    path = folder / "model.safetensors"
    ATTACKS[attack](path, marker)
    with pytest.raises(ModelError) as caught:
        load_model(EngineConfig(folder))
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    assert not marker.exists()


def test_pickles_beside_good_weights_are_not_read(folder, marker):
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "model.pkl", "modeling_evil.py"):
        pickled(folder / name, marker)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config))
    load_model(EngineConfig(folder))
    assert not marker.exists()


def test_a_shard_outside_the_folder(folder, tmp_path):
    outside = tmp_path / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    names = [name for name in parts(outside)[0] if name != "__metadata__"]
    for where in ("../outside.safetensors", str(outside)):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, where)}))
        with pytest.raises(ModelError, match="index"):
            load_model(EngineConfig(folder))


def test_a_config_that_asks_for_the_moon(folder):
    config = json.loads((folder / "config.json").read_text())
    for changes in (
        {"num_hidden_layers": 10**9},
        {"hidden_size": 2**62},
        {"vocab_size": -1},
        {"num_attention_heads": 0},
    ):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ModelError):
            load_model(EngineConfig(folder))


# ---- what the gateway reads ----


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"{}", b"[]", b'{"model": {}}', b"\xff" * 100])
def test_a_tokenizer_that_is_none(content):
    with pytest.raises(SettingsError):
        Tokenizer(content)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_pickle_for_a_config(folder, marker, name):
    pickled(folder / name, marker)
    with pytest.raises(SettingsError):
        read_folder(folder)
    assert not marker.exists()


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch ' ~ messages[0].content) }}",
    "{% for x in [].__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{{ '%s'.format.__self__.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{% set _ = messages[0].update({'role': 'system'}) %}{{ messages[0].role }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_does_not_get_out_of_its_sandbox(source, marker):
    """It is refused, or what it names is not there and stays empty."""
    try:
        text = ChatTemplate(source, {}).render([ChatMessage("user", str(marker))])
    except TemplateFailed as error:
        assert "\n" not in str(error)
    else:
        assert "subprocess" not in text and "root:" not in text and "<class" not in text, text[:200]
    assert not marker.exists()


@pytest.mark.parametrize(
    "content", ["{{ 7 * 7 }}", "{% for x in range(9) %}{% endfor %}", "{{ raise_exception('x') }}"]
)
def test_what_users_write_is_no_template(content):
    template = ChatTemplate("{% for message in messages %}{{ message['content'] }}{% endfor %}", {})
    assert template.render([ChatMessage("user", content)]) == content
