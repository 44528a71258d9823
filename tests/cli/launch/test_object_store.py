"""`baton up --model s3://...` and https://...: fetched once, in pieces that are not fetched twice, verified; S3 is
moto's, on loopback. gs:// takes the same way and has no server here."""

import errno
import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import boto3
import obstore
import pytest
from moto.backends import get_backend
from moto.core import DEFAULT_ACCOUNT_ID
from moto.server import ThreadedMotoServer

from baton.cli.launch import object_store
from baton.cli.launch.hub import find_model
from baton.cli.launch.placing.keeper import StartError
from baton.engine.weights.tensors import weight_files
from tests.support.pace import patience
from tests.support.process import ROOT

DEMO = ROOT / "demo" / "target"
TOOLS = "additional_chat_templates/tool_use.jinja"
FILES = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.suffix in (".json", ".safetensors")}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def s3(monkeypatch):
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
    client.create_bucket(Bucket="acme")
    for name, data in {**FILES, "pytorch_model.bin": b"\x80\x04 a pickle", "original/x.json": b"{}"}.items():
        client.put_object(Bucket="acme", Key=f"models/tiny/{name}", Body=data)
    client.stop = server.stop
    yield client
    server.stop()


class Web:
    """Serves files by name; `asked`: method, name and range of each request. `limit`: GETs of weights that are
    answered."""

    def __init__(self, files: dict[str, bytes]):
        self.files, self.asked, self.limit = dict(files), [], 10**9
        self.tags = {name: f'"{hashlib.md5(data).hexdigest()}"' for name, data in files.items()}
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                web.answer(self, False)

            def do_GET(self):
                web.answer(self, True)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/tiny"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler, has_body: bool) -> None:
        name, ranged = request.path.removeprefix("/tiny/"), request.headers.get("Range")
        self.asked.append((request.command, name, ranged))
        if has_body and name.endswith(".safetensors"):
            self.limit -= 1
        data, wanted = self.files.get(name), request.headers.get("If-Match")
        is_other = data is not None and wanted not in (None, self.tags[name])
        if data is None or is_other or self.limit < 0:
            request.send_response(404 if data is None else 412 if is_other else 403)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        begin, end = 0, len(data)
        if ranged:
            begin, end = (int(each) for each in ranged.removeprefix("bytes=").split("-"))
            end += 1
        request.send_response(206 if ranged else 200)
        if ranged:
            request.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        request.send_header("Content-Length", str(len(data[begin:end])))
        request.send_header("Last-Modified", "Mon, 01 Jun 2026 00:00:00 GMT")
        request.send_header("ETag", self.tags[name])
        request.end_headers()
        if has_body:
            request.wfile.write(data[begin:end])


@pytest.fixture
def web(monkeypatch):
    monkeypatch.setattr(object_store, "_PIECE_BYTES", 1 << 20)
    served = Web(FILES)
    yield served
    served.server.shutdown()
    served.server.server_close()


def refused(url: str) -> str:
    with pytest.raises(StartError) as caught:
        find_model(Path(url))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_in_s3(s3, capsys):
    folder = find_model(Path("s3://acme/models/tiny"))
    assert folder.name == "tiny" and {path.name: path.read_bytes() for path in folder.glob("[!.]*")} == FILES
    before = {path: path.stat().st_mtime_ns for path in folder.glob("[!.]*")}
    assert find_model(Path("s3://acme/models/tiny/")) == folder
    assert {path: path.stat().st_mtime_ns for path in before} == before, "nothing is fetched again"
    s3.put_object(Bucket="acme", Key="models/tiny/config.json", Body=b'{"new": 1}')
    assert (find_model(Path("s3://acme/models/tiny")) / "config.json").read_bytes() == b'{"new": 1}'
    s3.stop()
    assert find_model(Path("s3://acme/models/tiny")) == folder
    assert f"cannot be downloaded; {folder} has it (" in capsys.readouterr().err


@pytest.mark.parametrize("encryption", ["aws:kms", "AES256"])
def test_a_tag_that_is_no_md5(s3, encryption):
    """S3's is none where a key of KMS has encrypted the object; elsewhere it is another object's."""
    key = "models/tiny/model.safetensors"
    s3.put_object(Bucket="acme", Key=key, Body=FILES["model.safetensors"], ServerSideEncryption=encryption)
    get_backend("s3")[DEFAULT_ACCOUNT_ID]["aws"].buckets["acme"].keys[key]._etag = "0" * 32
    if encryption == "aws:kms":
        folder = find_model(Path("s3://acme/models/tiny"))
        assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    else:
        assert "is not what the store names" in refused("s3://acme/models/tiny")


def test_an_altered_object_is_removed_where_nobody_says_how_it_is_tagged(s3, monkeypatch):
    key = "models/tiny/model.safetensors"
    stored = get_backend("s3")[DEFAULT_ACCOUNT_ID]["aws"].buckets["acme"].keys[key]
    stored._etag = "0" * 32

    def sign(*arguments):
        raise obstore.exceptions.GenericError("nothing to sign with")

    monkeypatch.setattr(obstore, "sign", sign)
    assert "it is removed, try again" in refused("s3://acme/models/tiny")
    stored._etag = None
    assert (find_model(Path("s3://acme/models/tiny")) / "model.safetensors").exists()


def test_a_template_for_tools_in_s3(s3):
    s3.put_object(Bucket="acme", Key=f"models/tiny/{TOOLS}", Body=b"tools")
    folder = find_model(Path("s3://acme/models/tiny"))
    assert (folder / TOOLS).read_bytes() == b"tools" and not (folder / "original").exists()


def test_what_is_not_in_s3(s3):
    assert "has no model" in refused("s3://acme/models/other")
    assert "has no x.gguf" in refused("s3://acme/models/tiny/x.gguf")
    s3.stop()
    assert "cannot be downloaded, and is not whole in" in refused("s3://acme/models/never-seen")


def test_a_gguf_file_alone(s3):
    s3.put_object(Bucket="acme", Key="q/m.gguf", Body=b"GGUF")
    file = find_model(Path("s3://acme/q/m.gguf"))
    assert file.read_bytes() == b"GGUF" and [path.name for path in file.parent.glob("[!.]*")] == ["m.gguf"]


def test_a_web_server_and_pieces_that_are_not_fetched_twice(web):
    """The first try ends after one piece; the second fetches the others."""
    web.limit = 1
    assert "are its credentials set?" in refused(web.url)
    web.limit, web.asked = 10**9, []
    folder = find_model(Path(web.url))
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    ranges = [ranged for method, name, ranged in web.asked if (method, name) == ("GET", "model.safetensors")]
    assert ranges[0].startswith(f"bytes={1 << 20}-") and len(ranges) > 1 and len(set(ranges)) == len(ranges)


def test_two_that_download_the_same_take_turns(web, monkeypatch):
    """The one that has come first reads once the other waits, which then finds all of it."""
    waits, read = threading.Event(), object_store._Store.read

    def look_again(seconds):
        waits.set()
        time.sleep(seconds)

    def read_late(*arguments):
        assert waits.wait(patience(20)), "both read at once"
        return read(*arguments)

    monkeypatch.setattr(object_store, "time", SimpleNamespace(sleep=look_again))
    monkeypatch.setattr(object_store._Store, "read", read_late)
    with ThreadPoolExecutor(2) as pool:
        folders = {*pool.map(find_model, [Path(web.url)] * 2)}
    assert [(folder / "model.safetensors").read_bytes() for folder in folders] == [FILES["model.safetensors"]]
    ranges = [ranged for method, name, ranged in web.asked if (method, name) == ("GET", "model.safetensors")]
    assert len(set(ranges)) == len(ranges)


def test_where_files_cannot_be_locked_it_is_downloaded_all_the_same(web, monkeypatch):
    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(object_store.fcntl, "flock", refuse)
    assert (find_model(Path(web.url)) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


@pytest.mark.parametrize("where", ["the store's tag", "SHA256SUMS"])
def test_bytes_that_are_not_the_ones_named_are_removed(web, where):
    good, spoiled = FILES["model.safetensors"], b"X" + FILES["model.safetensors"][1:]
    web.files["model.safetensors"] = spoiled
    if where == "SHA256SUMS":
        web.tags["model.safetensors"] = '"v1"'
        web.files["SHA256SUMS"] = f"{hashlib.sha256(good).hexdigest()}  model.safetensors\n".encode()
        web.tags["SHA256SUMS"] = '"s1"'
    assert refused(web.url).startswith("model.safetensors: ")
    web.files["model.safetensors"] = good
    assert (find_model(Path(web.url)) / "model.safetensors").read_bytes() == good


def test_an_index_names_the_shards(web):
    web.files["a.safetensors"], web.tags["a.safetensors"] = b"1234", '"a"'
    web.files["model.safetensors.index.json"] = b'{"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}}'
    web.tags["model.safetensors.index.json"] = '"i"'
    folder = find_model(Path(web.url))
    assert (folder / "a.safetensors").exists() and not (folder / "model.safetensors").exists()
    web.files["model.safetensors.index.json"] = b'{"weight_map": {"x": "../a.safetensors"}}'
    assert "names what is no file of safetensors beside it" in refused(web.url)


def sharded(web: Web, version: str, **shards: str) -> dict[str, bytes]:
    """Store a model of these shards in the place of what is there, and return its files."""
    weight_map = json.dumps({"weight_map": {name: f"{name}.safetensors" for name in shards}})
    files = {"config.json": f'{{"version": "{version}"}}', "model.safetensors.index.json": weight_map}
    files |= {f"{name}.safetensors": f"{version} {text}" for name, text in shards.items()}
    web.files = {name: text.encode() for name, text in files.items()}
    web.tags = {name: f'"{hashlib.md5(data).hexdigest()}"' for name, data in web.files.items()}
    return web.files


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


def break_at(monkeypatch, name: str) -> None:
    """Have the link break before `name` is read."""
    read = object_store._Store.read

    def read_others(store, asked, *arguments):
        if asked == name:
            raise OSError("the link is broken")
        return read(store, asked, *arguments)

    monkeypatch.setattr(object_store._Store, "read", read_others)


def test_a_version_that_does_not_arrive_whole_leaves_the_one_before(web, monkeypatch, capsys):
    old = sharded(web, "v1", a="1", b="2")
    folder = find_model(Path(web.url))
    new = sharded(web, "v2", a="1", b="2")
    web.limit = 1
    assert "are its credentials set?" in refused(web.url)
    assert files_in(folder) == old
    web.limit = 10**9
    with monkeypatch.context() as broken:
        break_at(broken, "b.safetensors")
        assert find_model(Path(web.url)) == folder and files_in(folder) == old
    assert f"cannot be downloaded; {folder} has it (the link is broken)" in capsys.readouterr().err
    web.asked = []
    assert find_model(Path(web.url)) == folder and files_in(folder) == new
    assert [name for method, name, _ in web.asked if method == "GET" and name.endswith(".safetensors")] == [
        "b.safetensors"
    ], "the first is not fetched again"
    assert not list(folder.glob(".*.part"))


def test_a_version_is_not_whole_until_all_of_it_is_in_place(web, monkeypatch):
    sharded(web, "v1", a="1", b="2")
    folder = find_model(Path(web.url))
    new = sharded(web, "v2", a="1", b="2")
    replace = Path.replace

    def interrupted(path: Path, target: Path) -> Path:
        if target.name == "b.safetensors":
            raise KeyboardInterrupt
        return replace(path, target)

    with monkeypatch.context() as begun:
        begun.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            find_model(Path(web.url))
    with monkeypatch.context() as broken:
        break_at(broken, "model.safetensors.index.json")
        assert f"is not whole in {folder}" in refused(web.url)
    web.asked = []
    assert find_model(Path(web.url)) == folder and files_in(folder) == new
    assert not [name for method, name, _ in web.asked if method == "GET" and name.endswith(".safetensors")]


def test_files_that_the_store_has_no_more_are_removed(web):
    sharded(web, "v1", a="1", b="2")
    folder = find_model(Path(web.url))
    web.files["q.gguf"], web.tags["q.gguf"] = b"GGUF", '"q"'
    (folder / "notes.json").write_text("of somebody else")
    assert find_model(Path(f"{web.url}/q.gguf")).parent == folder
    gguf, web.files, web.tags = web.files["q.gguf"], dict(FILES), dict.fromkeys(FILES, '"v2"')
    find_model(Path(web.url))
    assert weight_files(folder) == [folder / "model.safetensors"]
    assert files_in(folder) == {**FILES, "q.gguf": gguf, "notes.json": b"of somebody else"}
    new = sharded(web, "v3", b="2", c="3")
    find_model(Path(web.url))
    assert weight_files(folder) == [folder / "b.safetensors", folder / "c.safetensors"]
    assert files_in(folder) == {**new, "q.gguf": gguf, "notes.json": b"of somebody else"}


@pytest.mark.parametrize("name", [TOOLS, "chat_template.json"])
def test_a_template_on_a_web_server(web, name):
    """Verified, replaced and removed as the files beside it are, also where it is in a folder below."""
    web.files |= {name: b"old", "SHA256SUMS": f"{hashlib.sha256(b'old').hexdigest()}  {name}\n".encode()}
    web.tags |= {name: '"v1"', "SHA256SUMS": '"s1"'}
    folder = find_model(Path(web.url))
    assert (folder / name).read_bytes() == b"old"
    web.asked = []
    find_model(Path(web.url))
    assert ("GET", name) not in {(method, asked) for method, asked, _ in web.asked}, "nothing is fetched again"
    web.files[name], web.tags[name] = b"new", '"v2"'
    assert f"{name}: is not what SHA256SUMS names" in refused(web.url)
    del web.files["SHA256SUMS"]
    find_model(Path(web.url))
    assert (folder / name).read_bytes() == b"new"
    del web.files[name]
    find_model(Path(web.url))
    assert not list((folder / name).parent.glob(f"*{Path(name).name}*")), "its marks are removed too"


@pytest.mark.parametrize("tag", ["strong", "weak"])
def test_a_model_that_is_replaced_while_it_is_downloaded(web, cache, monkeypatch, tag):
    """Also where its server compares no tags, as weak ones."""
    read = object_store._Store.read

    def weaken() -> None:
        if tag == "weak":
            web.tags = {name: f"W/{each}" for name, each in web.tags.items()}

    def read_and_replace(store, name, *arguments):
        data = read(store, name, *arguments)
        if name == "a.safetensors":
            sharded(web, "v2", a="1", b="2")
            weaken()
        return data

    sharded(web, "v1", a="1", b="2")
    weaken()
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(object_store._Store, "read", read_and_replace)
        assert "is not whole in" in refused(web.url)
    parts = {path.read_bytes() for path in cache.rglob(".*.part")}
    assert b"v2 2" not in parts and (b"v1 1" in parts) == (tag == "strong"), "what may be of either version is removed"
    folder = find_model(Path(web.url))
    assert files_in(folder) == web.files and web.files["a.safetensors"] == b"v2 1"


@pytest.mark.parametrize("is_in_place", [False, True])
def test_sums_that_do_not_fit_leave_no_folder_that_counts_as_whole(web, monkeypatch, is_in_place):
    """What is in place is held against other sums too; a new version against its own, before it is in place."""
    old = sharded(web, "v1", a="1")
    folder = find_model(Path(web.url))
    if not is_in_place:
        sharded(web, "v2", a="1")
    web.files["SHA256SUMS"], web.tags["SHA256SUMS"] = f"{'0' * 64}  a.safetensors\n".encode(), '"s"'
    assert "is not what SHA256SUMS names" in refused(web.url)
    break_at(monkeypatch, "model.safetensors.index.json")
    if is_in_place:
        assert "is not whole in" in refused(web.url)
    else:
        assert find_model(Path(web.url)) == folder and files_in(folder) == old


def test_plain_text_beyond_this_host_is_refused():
    assert "use https://" in refused("http://models.example.net/tiny")
