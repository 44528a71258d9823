"""The launcher of Kubernetes against an API server of the tests."""

import pytest

from baton.cli.launch.cluster.kubernetes import KubernetesLauncher
from baton.cli.launch.cluster.kubernetes_api import KubernetesApi
from baton.cli.launch.placing.launcher import LaunchError, scale
from baton.cli.main import main
from tests.support.launch.kubernetes import ApiServer
from tests.support.launch.launchers import all_serve, check_launcher, until

BOTH = (("b-prefill", "prefill", "b"), ("b-decode", "decode", "b"))


async def test_scales_deployments():
    server = ApiServer(*BOTH)
    async with server.serve() as url:
        await check_launcher(KubernetesLauncher.find("llm", None, url))
    patched = {path for method, path in server.calls if method == "PATCH"}
    assert {"/apis/apps/v1/namespaces/llm/deployments/b-decode/scale"} < patched, (
        "the scale alone, never the Deployment"
    )
    assert not any(path.endswith(("b-decode", "b-prefill")) for path in patched)


async def test_as_a_pod_with_its_service_account(tmp_path, monkeypatch):
    """The token is read for each call: Kubernetes changes it every hour."""
    server = ApiServer(*BOTH, token="first")
    async with server.serve() as url:
        (tmp_path / "token").write_text("first\n")
        launcher = KubernetesLauncher(KubernetesApi(url, tmp_path / "token"), "llm")
        await launcher.start("decode", 1)
        await until(launcher, all_serve(1))
        server.token = "second"
        with pytest.raises(LaunchError, match="401 Unauthorized"):
            await launcher.list()
        (tmp_path / "token").write_text("second")
        assert len(await launcher.list()) == 1


async def test_another_may_scale_meanwhile():
    server = ApiServer(*BOTH)
    async with server.serve() as url:
        launcher = KubernetesLauncher.find("llm", None, url)
        server.conflicts = 2
        await launcher.start("decode", 2)
        await until(launcher, all_serve(2))
        server.conflicts = 3
        with pytest.raises(LaunchError, match="409"):
            await launcher.start("decode", 1)


async def test_pods_that_are_still_to_be_made_are_not_asked_for_again():
    """Where a quota keeps them away, `baton scaler` asks for as many every minute."""
    server = ApiServer(*BOTH)
    async with server.serve() as url:
        launcher = KubernetesLauncher.find("llm", None, url)
        await launcher.start("decode", 1)
        await until(launcher, all_serve(1))
        server.makes_pods = False
        for _ in range(2):
            await scale(launcher, "decode", 3)
        assert server.deployments["b-decode"]["replicas"] == 3


async def test_one_release_of_several():
    server = ApiServer(*BOTH, ("c-decode", "decode", "c"))
    async with server.serve() as url:
        with pytest.raises(LaunchError, match="2 Deployments.*--release"):
            await KubernetesLauncher.find("llm", None, url).start("decode", 1)
        launcher = KubernetesLauncher.find("llm", "c", url)
        await launcher.start("decode", 1)
        (worker,) = await until(launcher, all_serve(1))
        assert worker.name.startswith("c-decode") and worker.address == "10.0.0.1:50061" and worker.where == "node-0"
        with pytest.raises(LaunchError, match="0 Deployments.*installed"):
            await launcher.start("prefill", 1)


async def test_why_a_pod_does_not_serve():
    server = ApiServer(*BOTH, step_s=60)
    async with server.serve() as url:
        launcher = KubernetesLauncher.find("llm", None, url)
        await launcher.start("decode", 1)
        await until(launcher, lambda workers: len(workers) == 1)
        (pod,) = server.pods.values()
        waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
        pod["status"] = {"containerStatuses": [{"restartCount": 2, "state": waiting}]}
        (worker,) = await launcher.list()
        assert (worker.state, worker.reason, worker.address) == ("lost", "CrashLoopBackOff back-off 10s", "")


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
async def test_a_pod_that_has_ended_for_good_is_no_worker(phase):
    """One that was evicted stays listed until it is collected, and its Deployment has another in its place."""
    server = ApiServer(*BOTH)
    async with server.serve() as url:
        launcher = KubernetesLauncher.find("llm", None, url)
        await launcher.start("decode", 4)
        await until(launcher, all_serve(4))
        server.pods["b-decode-0"]["status"] = {"phase": phase, "reason": "Evicted", "message": "low on memory"}
        server.deployments["b-decode"]["replicas"] = 3  # the fake's controller counts the dead one, theirs does not
        await scale(launcher, "decode", 3)
        assert len(await launcher.list()) == 3 and server.deployments["b-decode"]["replicas"] == 3


async def test_without_an_answer():
    async with ApiServer(*BOTH).serve() as url:
        pass
    with pytest.raises(LaunchError, match="Kubernetes at 127.0.0.1"):
        await KubernetesLauncher.find("llm", None, url).list()


def test_outside_of_a_pod(monkeypatch, capsys):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["scale", "--launcher", "kubernetes"]) == 1
    assert "no pod with a service account: give --api" in capsys.readouterr().err
    assert main(["scale", "--namespace", "llm"]) == 2
    assert "--namespace has no effect" in capsys.readouterr().err
    assert main(["scale", "--launcher", "kubernetes", "--namespace", "llm", "--api", "127.0.0.1:8001"]) == 2
    assert "http://HOST:PORT" in capsys.readouterr().err
