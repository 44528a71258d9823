"""A small hub on loopback: the calls that huggingface_hub makes to list and download one repository."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" * 6 + "beef"


class Hub:
    """`asked`: the paths of requests. `spoiled`: names of files that are served with one byte changed."""

    def __init__(self, repository: str, folder: Path):
        self.repository, self.folder = repository, folder
        self.asked: list[str] = []
        self.spoiled: set[str] = set()
        self.url = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(path)
        path = path.partition("?")[0]
        if path.startswith(f"/api/models/{self.repository}/revision/"):
            if path.rpartition("/")[2] not in ("main", "v1", COMMIT):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            siblings = [{"rfilename": name} for name in self._names()]
            body = {"id": self.repository, "modelId": self.repository, "sha": COMMIT, "siblings": siblings}
            return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()
        if path.startswith(f"/api/models/{self.repository}/tree/"):
            entries = [self._entry(name) for name in self._names()]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        if path.startswith(f"/{self.repository}/resolve/"):
            name = path.split("/", 5)[5]
            if name not in self._names():
                return 404, {"X-Error-Code": "EntryNotFound"}, b""
            data = (self.folder / name).read_bytes()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(name, data)}"'}
            if name in self.spoiled:
                data = bytes([data[0] ^ 1]) + data[1:]
            return 200, headers, data
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _names(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())

    def _entry(self, name: str) -> dict:
        data = (self.folder / name).read_bytes()
        entry = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        if _is_large(name):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 100}
        return entry


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", ".bin"))


def _digest(name: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if _is_large(name) else hashlib.sha1(data).hexdigest()


@contextmanager
def serving_hub(hub: Hub) -> Iterator[Hub]:
    """Serve it at `hub.url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(has_body=True)

        def do_HEAD(self) -> None:
            self._send(has_body=False)

        def _send(self, has_body: bool) -> None:
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if has_body:
                self.wfile.write(body)

        def log_message(self, *arguments) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
