"""What stands in place of a model's file is said by all who read one: a link that leads nowhere, Git LFS's pointer."""

import json

import pytest

from baton.engine.adapters.lora_folder import LoraFolder
from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.models.loader import load_model, model_identity
from baton.engine.models.registry import read_spec
from baton.service.settings import SettingsError
from baton.worker.hello import tokenizer_digest
from gateway.model.model_file import read_model
from tests.support.gateway.small_tokenizers import byte_level
from tests.support.gguf.metadata import metadata, write
from tests.support.model_folders.families import make_adapter, make_folder

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234567\n"
WAYS = {
    "link": (lambda path: path.symlink_to("../blobs/0123"), "is a link to ../blobs/0123, which is not there"),
    "pointer": (lambda path: path.write_text(POINTER), "is Git LFS's pointer to the file; fetch the file itself: git lfs pull"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    model = make_folder(tmp_path / "model", "qwen3", vocab_size=420)
    make_adapter(tmp_path / "adapter", model, ["q_proj"])
    files = {"tokenizer_config.json": {}, "model.safetensors.index.json": {}, "quantize_config.json": {}}
    for name, content in files.items():
        (tmp_path / "model" / name).write_text(json.dumps(content))
    (tmp_path / "model" / "tokenizer.json").write_bytes(byte_level())
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    write(tmp_path / "model.gguf", metadata())
    return tmp_path / "model"


def weights(folder):
    return load_model(EngineConfig(folder))


def replace(path, way: str) -> str:
    put, told = WAYS[way]
    path.unlink()
    put(path)
    return f"{path}: {told}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_spec),
        ("generation_config.json", read_spec),
        ("quantize_config.json", weights),
        ("model.safetensors.index.json", weights),
        ("model.safetensors", weights),
    ],
)
def test_the_engine_names_a_model_file_that_is_not_itself(folder, name, read, way):
    if name in ("quantize_config.json", "model.safetensors"):
        (folder / "model.safetensors.index.json").unlink()
    if name == "model.safetensors":
        (folder / "quantize_config.json").unlink()
    told = replace(folder / name, way)
    with pytest.raises(ModelError) as caught:
        read(folder)
    assert str(caught.value).startswith(told)


def test_the_worker_names_a_tokenizer_that_is_a_dangling_link(folder):
    """It reads no word of the tokenizer: a pointer in its place has another digest, and the gateway says what it is."""
    digest = tokenizer_digest(folder)
    replace(folder / "tokenizer.json", "pointer")
    assert tokenizer_digest(folder) != digest
    told = replace(folder / "tokenizer.json", "link")
    with pytest.raises(ModelError) as caught:
        tokenizer_digest(folder)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_the_gateway_names_a_model_file_that_is_not_itself(folder, name, way):
    """A chat template that is not there is not the same as none, nor is what ends an answer."""
    told = replace(folder / name, way)
    with pytest.raises(SettingsError) as caught:
        read_model(folder)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("way", WAYS)
def test_a_gguf_file(folder, way):
    path = folder.with_suffix(".gguf")
    told = replace(path, way)
    for read, kind in ((read_spec, ModelError), (read_model, SettingsError)):
        with pytest.raises(kind) as caught:
            read(path)
        assert str(caught.value).startswith(told)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_the_files_of_an_adapter_are_named_too(folder, name, way):
    told = replace(folder.parent / "adapter" / name, way)
    with pytest.raises(ModelError) as caught:
        LoraFolder(folder.parent / "adapter")
    assert str(caught.value).startswith(told)


def test_the_identity_of_weights_that_are_a_link(folder):
    (folder / "model.safetensors.index.json").unlink()
    told = replace(folder / "model.safetensors", "link")
    with pytest.raises(ModelError, match="which is not there") as caught:
        model_identity(folder)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("vocabulary", ["tekken.json", "tokenizer.model"])
def test_of_what_a_tokenizer_can_be_made(folder, vocabulary):
    """Mistral Small 3.2, Magistral and Devstral are published with a tekken.json alone."""
    path = folder / "tokenizer.json"
    path.unlink()
    for beside in (None, vocabulary):
        if beside:
            (folder / beside).write_text("{}")
        told = (
            f"is not there; make it of {beside}, as docs/models.md says (Weights)"
            if beside
            else "No such file or directory"
        )
        for read, error in ((read_model, SettingsError), (tokenizer_digest, ModelError)):
            with pytest.raises(error) as caught:
                read(folder)
            assert str(caught.value) == f"{path}: {told}"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_of_what_weights_can_be_made(folder, name):
    (folder / "model.safetensors.index.json").unlink()
    (folder / "quantize_config.json").unlink()
    path = folder / "model.safetensors"
    path.rename(folder / name)
    with pytest.raises(ModelError) as caught:
        weights(folder)
    assert str(caught.value) == f"{path}: is not there; make it of {name}, as docs/models.md says (Weights)"


def test_a_tokenizer_that_cannot_be_read_is_there(folder):
    path = folder / "tokenizer.json"
    path.unlink()
    path.mkdir()
    (folder / "tokenizer.model").write_text("{}")
    for read, error in ((read_model, SettingsError), (tokenizer_digest, ModelError)):
        with pytest.raises(error) as caught:
            read(folder)
        assert str(caught.value) == f"{path}: Is a directory"
