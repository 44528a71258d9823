"""Place workers by Kubernetes' own controllers: each role has a Deployment, whose `scale` is its number of pods.

SIGTERM drains a pod that is removed. The pod-deletion cost decides which pod that is."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from baton.cli.launch.cluster.kubernetes_api import ApiError, KubernetesApi
from baton.cli.launch.placing.launcher import LaunchError, PlacedWorker

NAME_LABEL, ROLE_LABEL, RELEASE_LABEL = (f"app.kubernetes.io/{each}" for each in ("name", "component", "instance"))
_COST = "controller.kubernetes.io/pod-deletion-cost"
_GOES_FIRST = "-1000"
_ENDED = ("Failed", "Succeeded")  # phases of pods whose containers do not start again
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PORT_NAME = "grpc"
_WATCH_S = 60  # after which a watch is opened again, since a connection may be dead without notice


class KubernetesLauncher:
    """The Deployments of a namespace with the labels app.kubernetes.io/name=baton and
    app.kubernetes.io/component=ROLE."""

    keeps_roles = True

    def __init__(self, api: KubernetesApi, namespace: str, release: str | None = None):
        self._api, self._namespace = api, quote(namespace)
        labels = {NAME_LABEL: "baton", **({RELEASE_LABEL: release} if release else {})}
        self._labels = ",".join(f"{name}={value}" for name, value in labels.items())

    @classmethod
    def find(
        cls, namespace: str | None, release: str | None, api_url: str | None, account: Path = _ACCOUNT
    ) -> KubernetesLauncher:
        """Return the launcher that reaches the API as a pod does, by its service account, or at `api_url`. Raises
        LaunchError."""
        try:
            namespace = namespace or (account / "namespace").read_text().strip()
            if api_url is not None:
                return cls(KubernetesApi(api_url), namespace, release)
            url = f"https://{_bracketed(os.environ['KUBERNETES_SERVICE_HOST'])}:{os.environ['KUBERNETES_SERVICE_PORT']}"
            tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except (KeyError, OSError):
            message = "this is no pod with a service account: give --api, as `kubectl proxy` prints it, and --namespace"
            raise LaunchError(message) from None
        return cls(KubernetesApi(url, account / "token", tls), namespace, release)

    async def start(self, role: str, number: int) -> None:
        """Add pods to the role's Deployment. Replicas that it has not created yet, perhaps for lack of quota, count as
        part of `number`: the caller does not see them."""
        num_pods = sum(worker.role == role and worker.stays for worker in await self.list())
        await self._scale(role, lambda replicas: max(replicas, num_pods + number))

    async def drain(self, name: str) -> None:
        pod = f"/api/v1/namespaces/{self._namespace}/pods/{quote(name)}"
        try:
            role = (await self._api.call("GET", pod))["metadata"]["labels"][ROLE_LABEL]
            await self._api.call("PATCH", pod, {"metadata": {"annotations": {_COST: _GOES_FIRST}}})
        except (ApiError, KeyError) as error:
            raise LaunchError(f"{name}: is no worker that can be drained: {error}") from None
        await self._scale(role, lambda replicas: max(0, replicas - 1))

    async def list(self) -> list[PlacedWorker]:
        return (await self._pods())[0]

    async def watch(self) -> AsyncIterator[list[PlacedWorker]]:
        """Yield the workers after each change. An event only triggers a new list, so a lost event does no harm."""
        while True:
            workers, version = await self._pods()
            yield workers
            asked = {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(_WATCH_S)}
            try:
                async for event in self._api.events(self._pods_path(asked)):
                    if event.get("type") == "ERROR":
                        break  # the resource version is too old
                    now = (await self._pods())[0]
                    if now != workers:
                        workers = now
                        yield workers
            except ApiError as error:
                raise LaunchError(str(error)) from None

    async def _scale(self, role: str, change: Callable[[int], int]) -> None:
        """Set the replicas of a role to `change(replicas)`. Raises LaunchError."""
        try:
            path = f"{await self._deployment(role)}/scale"
            for is_last in (False, False, True):
                scale = await self._api.call("GET", path)
                wanted = change(scale["spec"].get("replicas", 0))
                version = scale["metadata"]["resourceVersion"]
                try:
                    patch = {"metadata": {"resourceVersion": version}, "spec": {"replicas": wanted}}
                    await self._api.call("PATCH", path, patch)
                    return
                except ApiError as error:
                    if error.status != 409 or is_last:  # another client has changed it meanwhile
                        raise
        except ApiError as error:
            raise LaunchError(str(error)) from None

    async def _deployment(self, role: str) -> str:
        """Return the path of the role's Deployment. Raises ApiError, LaunchError."""
        path = f"/apis/apps/v1/namespaces/{self._namespace}/deployments"
        found = await self._api.call("GET", f"{path}?{urlencode({'labelSelector': self._selector(role)})}")
        names = [item["metadata"]["name"] for item in found["items"]]
        if len(names) != 1:
            hint = "give --release" if names else "is the chart installed there?"
            raise LaunchError(f"{len(names)} Deployments with {self._selector(role)}, not one: {hint}")
        return f"{path}/{quote(names[0])}"

    async def _pods(self) -> tuple[list[PlacedWorker], str]:
        """Return the workers, and the resource version of their list. Raises LaunchError."""
        try:
            found = await self._api.call("GET", self._pods_path({}))
        except ApiError as error:
            raise LaunchError(str(error)) from None
        # An evicted pod is listed until it is collected, but its Deployment no longer counts it.
        living = [pod for pod in found["items"] if pod.get("status", {}).get("phase") not in _ENDED]
        items = sorted(living, key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]))
        return [_worker(pod) for pod in items], found["metadata"]["resourceVersion"]

    def _pods_path(self, asked: Mapping[str, str]) -> str:
        query = urlencode({"labelSelector": self._selector("prefill,decode"), **asked})
        return f"/api/v1/namespaces/{self._namespace}/pods?{query}"

    def _selector(self, roles: str) -> str:
        return f"{self._labels},{ROLE_LABEL} in ({roles})"


def _worker(pod: dict[str, Any]) -> PlacedWorker:
    meta, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions", ()))
    state = "draining" if "deletionTimestamp" in meta else "serving" if ready else "starting"
    containers = status.get("containerStatuses", ())
    waiting = [each["state"]["waiting"] for each in containers if "waiting" in each.get("state", {})]
    if state == "starting" and any(each.get("restartCount", 0) for each in containers):
        state = "lost"
    reason = next(
        (f"{each.get('reason', '')} {each.get('message', '')}".strip() for each in waiting), status.get("message", "")
    )
    ports = [port for each in spec.get("containers", ()) for port in each.get("ports", ())]
    port = next((port["containerPort"] for port in ports if port.get("name") == _PORT_NAME), None)
    address = f"{_bracketed(status['podIP'])}:{port}" if status.get("podIP") and port else ""
    return PlacedWorker(meta["name"], meta["labels"][ROLE_LABEL], state, address, spec.get("nodeName", ""), reason)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
