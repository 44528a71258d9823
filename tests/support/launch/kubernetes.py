"""An API server of Kubernetes as far as a launcher asks it, with controllers that make and end pods."""

import asyncio
import itertools
import json
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from baton.service.net.http_server import open_http

COST = "controller.kubernetes.io/pod-deletion-cost"
ROLE = "app.kubernetes.io/component"
PATH = "/apis/apps/v1/namespaces/{namespace}/deployments"


class ApiServer:
    """Deployments and pods of the namespace `llm`. Pods take `step_s` to become ready, and to end."""

    def __init__(self, *deployments: tuple[str, str, str], token: str | None = None, step_s: float = 0.05):
        """`deployments`: (name, role, release) each."""
        self.token, self._step_s = token, step_s
        self._versions = itertools.count(1)
        self.version = 0
        self.makes_pods = True  # False: a quota keeps them away
        self.conflicts = 0  # so many patches of a scale are refused as stale
        self.deployments = {
            name: {"role": role, "release": release, "replicas": 0} for name, role, release in deployments
        }
        self.pods: dict[str, dict] = {}
        self.drained: list[str] = []
        self.calls: list[tuple[str, str]] = []
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()
        routes = [
            Route(PATH, self._list_deployments),
            Route(PATH + "/{name}/scale", self._scale, methods=["GET", "PATCH"]),
            Route("/api/v1/namespaces/{namespace}/pods", self._list_pods),
            Route("/api/v1/namespaces/{namespace}/pods/{name}", self._pod, methods=["GET", "PATCH"]),
        ]
        self.app = Starlette(routes=routes)

    @asynccontextmanager
    async def serve(self):
        """Yield the URL."""
        server = open_http("127.0.0.1:0", self.app, lambda is_too_large: JSONResponse({}, 400))
        server.start()
        try:
            yield f"http://127.0.0.1:{server.port}"
        finally:
            for task in self._tasks:
                task.cancel()
            self._tell()
            await server.stop()

    # ---- controllers ----

    def _tell(self) -> None:
        self.version = next(self._versions)
        self._changed.set()
        self._changed = asyncio.Event()

    def _later(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _reconcile(self, name: str) -> None:
        deployment = self.deployments[name]
        mine = [
            pod for pod in self.pods.values() if pod["owner"] == name and "deletionTimestamp" not in pod["metadata"]
        ]
        for _ in range(deployment["replicas"] - len(mine) if self.makes_pods else 0):
            self._later(self._bring_up(name))
        costs = lambda pod: (int(pod["metadata"]["annotations"].get(COST, 0)), -pod["number"])  # noqa: E731
        for pod in sorted(mine, key=costs)[: max(0, len(mine) - deployment["replicas"])]:
            pod["metadata"]["deletionTimestamp"] = "now"
            self._later(self._take_down(pod["metadata"]["name"]))
        self._tell()

    async def _bring_up(self, owner: str) -> None:
        number, deployment = next(self._numbers), self.deployments[owner]
        labels = {
            "app.kubernetes.io/name": "baton", ROLE: deployment["role"], "app.kubernetes.io/instance": deployment["release"]
        }  # fmt: skip
        name = f"{owner}-{number}"
        ports = [{"name": "grpc", "containerPort": 50061}]
        pod = self.pods[name] = {
            "owner": owner,
            "number": number,
            "metadata": {"name": name, "labels": labels, "annotations": {}, "creationTimestamp": f"{number:06}"},
            "spec": {"nodeName": f"node-{number}", "containers": [{"ports": ports}]},
            "status": {"phase": "Pending"},
        }
        self._tell()
        await asyncio.sleep(self._step_s)
        pod["status"] = {"podIP": f"10.0.0.{number + 1}", "conditions": [{"type": "Ready", "status": "True"}]}
        self._tell()

    async def _take_down(self, name: str) -> None:
        await asyncio.sleep(self._step_s)
        self.drained.append(name)
        del self.pods[name]
        self._tell()

    # ---- what is asked ----

    def _refusal(self, request: Request) -> JSONResponse | None:
        self.calls.append((request.method, request.url.path))
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            return JSONResponse({"kind": "Status", "message": "Unauthorized", "code": 401}, 401)
        if request.path_params["namespace"] != "llm":
            return JSONResponse({"kind": "Status", "message": "forbidden", "code": 403}, 403)
        return None

    def _selected(self, request: Request, labels: dict[str, str]) -> bool:
        selector = request.query_params.get("labelSelector", "")
        for part in (
            selector.replace(" in (", "=").replace(")", "").replace("prefill,decode", "prefill|decode").split(",")
        ):
            name, _, values = part.partition("=")
            if labels.get(name) not in values.split("|"):
                return False
        return True

    async def _list_deployments(self, request: Request) -> JSONResponse:
        if refusal := self._refusal(request):
            return refusal
        found = [
            {"metadata": {"name": name}}
            for name, each in self.deployments.items()
            if self._selected(
                request,
                {"app.kubernetes.io/name": "baton", ROLE: each["role"], "app.kubernetes.io/instance": each["release"]},
            )
        ]
        return JSONResponse({"items": found})

    async def _scale(self, request: Request) -> JSONResponse:
        if refusal := self._refusal(request):
            return refusal
        name = request.path_params["name"]
        if request.method == "PATCH":
            assert request.headers["content-type"] == "application/merge-patch+json"
            patch = await request.json()
            if self.conflicts or patch["metadata"]["resourceVersion"] != str(self._scale_version(name)):
                self.conflicts = max(0, self.conflicts - 1)
                return JSONResponse({"kind": "Status", "message": "the object has been modified"}, 409)
            self.deployments[name]["replicas"] = patch["spec"]["replicas"]
            self._reconcile(name)
        spec = {"replicas": self.deployments[name]["replicas"]}
        return JSONResponse(
            {"metadata": {"name": name, "resourceVersion": str(self._scale_version(name))}, "spec": spec}
        )

    def _scale_version(self, name: str) -> int:
        return self.deployments[name]["replicas"]

    async def _pod(self, request: Request) -> JSONResponse:
        if refusal := self._refusal(request):
            return refusal
        pod = self.pods.get(request.path_params["name"])
        if pod is None:
            return JSONResponse({"kind": "Status", "message": f'pods "{request.path_params["name"]}" not found'}, 404)
        if request.method == "PATCH":
            pod["metadata"]["annotations"] |= (await request.json())["metadata"]["annotations"]
            self._tell()
        return JSONResponse(pod)

    async def _list_pods(self, request: Request):
        if refusal := self._refusal(request):
            return refusal
        if "watch" in request.query_params:
            return StreamingResponse(self._events(int(request.query_params["resourceVersion"])))
        items = [pod for pod in self.pods.values() if self._selected(request, pod["metadata"]["labels"])]
        return JSONResponse({"metadata": {"resourceVersion": str(self.version)}, "items": items})

    async def _events(self, version: int):
        """Return one line for each change; three, and the server ends the watch, as it may at any time."""
        for _ in range(3):
            while self.version == version:
                await self._changed.wait()
            version = self.version
            line = json.dumps({"type": "MODIFIED", "object": {"metadata": {"resourceVersion": str(version)}}}) + "\n"
            yield line[:7].encode()
            yield line[7:].encode()
