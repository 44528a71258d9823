"""What helm makes of each file of values: valid by schema, as it was when it was last looked at, and of real flags."""

import functools
import os
import re
import tarfile
from pathlib import Path

import kubernetes_validate.utils
import pytest
import yaml

import baton.worker.settings
from baton.service.net import probe
from baton.service.settings import given, make_settings
from baton.worker.session.drain import ASK_S, FLUSH_S, SETTLE_S
from baton.worker.settings import WorkerSettings
from gateway.config.settings import GatewaySettings
from tests.chart.checks import GATEWAY, WORKER, check, parsed
from tests.chart.rendering import CASES, CHART, ROOT, ChartError, container, helm, named, pods, promtool, render

GOLDEN = Path(__file__).parent / "golden"
# The schemas are 6 MB of JSON, which the package reads for each object.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)

case = pytest.mark.parametrize("values", CASES, ids=lambda path: path.stem)


@case
def test_valid_by_the_schemas(values):
    check(render(values))


@case
def test_as_it_was_looked_at(values):
    """Files of the repository stand in it by their names. `BATON_GOLDEN=write` renews them: read the difference."""
    objects = render(values)
    for each in objects:
        if each["kind"] == "ConfigMap":
            for name, text in each["data"].items():
                (source,) = [path for path in (ROOT / "deploy").rglob(name) if "helm/files/d" not in str(path)]
                assert text.strip() == source.read_text().strip()
                each["data"][name] = f"<{source.relative_to(ROOT)}>"
        elif each["kind"] == "PrometheusRule":
            files = sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yml"))
            for rule in (rule for group in each["spec"]["groups"] for rule in group["rules"]):
                rule["expr"] = re.sub(r'\{namespace="llm"(?:\}|(,))', lambda found: "{" * bool(found[1]), rule["expr"])
            assert each["spec"]["groups"] == [
                group for path in files for group in yaml.safe_load(path.read_text())["groups"]
            ]
            each["spec"]["groups"] = [f"<{path.relative_to(ROOT)}>" for path in files]
    text = yaml.safe_dump_all(objects, sort_keys=False, width=120)
    golden = GOLDEN / values.name
    if os.environ.get("BATON_GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text()


@case
def test_every_argument_list_is_taken_by_the_process(values, monkeypatch, tmp_path):
    """And makes settings that the process accepts; a GPU is there as far as these ask."""
    monkeypatch.setattr(baton.worker.settings, "find_runtime", lambda: object())
    (tmp_path / "kv").mkdir()
    seen = set()
    for component, template in pods(render(values)):
        if component not in (GATEWAY, *WORKER):
            continue
        process = container(template)
        assert process["command"] == ["python", "-m", GATEWAY if component == GATEWAY else f"{component}_worker"]
        argv = [word.replace("=/kv", f"={tmp_path}/kv") for word in process["args"]]
        flags = vars(parsed(process["command"][2], argv))
        flags.pop("config")
        cls = GatewaySettings if component == GATEWAY else WorkerSettings
        settings = make_settings(cls, given(cls, flags))
        assert settings.tls is not None
        seen.add(component)
    assert seen == {GATEWAY, *WORKER}


@case
def test_health_checks_are_commands_of_ours(values, capsys):
    for component, template in pods(render(values)):
        if component not in (GATEWAY, *WORKER):
            continue
        process = container(template)
        port = next(each["containerPort"] for each in process["ports"] if each["name"] == "grpc")
        for name in ("readinessProbe",) if component == GATEWAY else ("startupProbe", "readinessProbe"):
            argv = process[name]["exec"]["command"]
            assert argv[:3] == ["python", "-m", probe.__name__] and argv[-1] == f"127.0.0.1:{port}"
            with pytest.raises(SystemExit):  # its flags are known: what it lacks is the file
                probe.main(argv[3:])
            assert re.search(
                r"error: --tls-(ca|cert|key) /run/secrets/tls/\S+: cannot be read", capsys.readouterr().err
            )


@case
def test_a_pod_has_time_to_drain(values):
    """A worker beyond its grace, too: requests that move have their KV pulled."""
    for component, template in pods(render(values)):
        if component not in (GATEWAY, *WORKER):
            continue
        process, most = container(template), template["spec"]["terminationGracePeriodSeconds"]
        grace = next(float(word.partition("=")[2]) for word in process["args"] if word.startswith("--drain-grace-s="))
        if component == GATEWAY:
            grace += process["lifecycle"]["preStop"]["sleep"]["seconds"]
        else:
            grace += ASK_S + SETTLE_S + FLUSH_S
        assert grace + 15 < most


@case
def test_who_takes_over_a_worker_is_no_operator(values):
    """It holds the key of its role and no other; SIGTERM drains it, for which it needs none."""
    for role in WORKER:
        template = dict(pods(render(values)))[role]
        secrets = [each["secret"]["secretName"] for each in template["spec"]["volumes"] if "secret" in each]
        assert secrets == [f"rel-baton-{role}-tls"] and "lifecycle" not in container(template)


@case
def test_a_gateway_has_started_before_its_workers_have(values):
    """They may take longer than it is waited for: what says that they serve is for its readiness alone."""
    process = container(dict(pods(render(values)))[GATEWAY])
    assert (
        process["startupProbe"]["httpGet"]
        == process["livenessProbe"]["httpGet"]
        == {"path": "/healthz", "port": "admin"}
    )


@case
def test_the_parts_fit_together(values):
    """Names, ports and Secrets that one object speaks of are made by another one."""
    objects = render(values)
    services = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Service"}
    templates = dict(pods(objects))
    for service in services.values():
        component = service["spec"]["selector"]["app.kubernetes.io/component"]
        ports = {each["name"] for each in container(templates[component])["ports"]}
        assert {each["targetPort"] for each in service["spec"]["ports"]} <= ports
    flags = dict(word[2:].split("=", 1) for word in container(templates[GATEWAY])["args"] if "=" in word)
    for role in WORKER:
        name, _, port = flags[f"{role}-workers"].partition(":")
        assert services[name]["spec"]["clusterIP"] == "None"  # each worker by its own address
        assert int(port) in {each["port"] for each in services[name]["spec"]["ports"]}
    made = made_secrets(objects)
    for component, template in templates.items():
        for volume in template["spec"].get("volumes", []):
            if "secret" in volume:
                assert volume["secret"]["secretName"] in made, (component, volume)
        mounted = {each["name"] for each in container(template).get("volumeMounts", [])}
        assert mounted == {each["name"] for each in template["spec"].get("volumes", [])}
    if any(each["kind"] == "ServiceMonitor" for each in objects):
        labelled = [each for each in services.values() if "baton-job" in each["metadata"]["labels"]]
        assert len(labelled) == 3
        assert all("admin" in {port["name"] for port in each["spec"]["ports"]} for each in labelled)


def test_a_load_balancer_is_of_clients_alone():
    """Metrics and pages name tenants and requests, over plain HTTP, and Prometheus finds them at each gateway's own
    address."""
    objects = render({"gateway": {"http": True, "service": {"type": "LoadBalancer"}}, "monitoring": {"enabled": True}})
    public, each = (named(objects, "Service", name) for name in ("gateway", "gateways"))
    assert {port["port"] for port in public["spec"]["ports"]} == {50051, 8000}
    assert {port["port"] for port in each["spec"]["ports"]} == {50051, 50052, 9464}
    assert (public["spec"]["type"], each["spec"]["clusterIP"]) == ("LoadBalancer", "None")
    assert each["metadata"]["labels"]["baton-job"] == "baton-gateway"


@pytest.mark.parametrize("certificates", ["job", "cert-manager"])
def test_certificates_name_both_services_of_gateways_as_the_cluster_does(certificates):
    objects = render({"secrets": {"certificates": certificates}})
    if certificates == "job":
        (job,) = (each for each in objects if each["kind"] == "Job")
        told = {each["name"]: each["value"] for each in container(job["spec"]["template"])["env"]}
        names = told["HOSTS"].split(",")
    else:
        names = named(objects, "Certificate", "gateway-tls")["spec"]["dnsNames"]
    services = ("rel-baton-gateway", "rel-baton-gateways")
    assert {f"{each}{of}" for each in services for of in ("", ".llm", ".llm.svc")} <= set(names)


def made_secrets(objects: list[dict]) -> set[str]:
    """Return the names that the Job or cert-manager makes."""
    made = {each["spec"]["secretName"] for each in objects if each["kind"] == "Certificate"}
    for job in (each for each in objects if each["kind"] == "Job"):
        told = {each["name"]: each["value"] for each in container(job["spec"]["template"])["env"]}
        if "certificates" in told["MAKE"]:
            made |= {f"{told['NAME']}-{role}-tls" for role in (*WORKER, GATEWAY, "operator", "redis")}
        if "credentials" in told["MAKE"]:
            made |= {f"{told['NAME']}-{each}" for each in ("gateway", "redis", "caller")}
    return made


@pytest.mark.parametrize("days", [1, 30, 365, 730])
def test_an_authority_of_its_own_outlives_what_it_signs(days):
    """Renewed once a third of its time is left, as cert-manager does by default, it is never outlived by a
    certificate."""
    made = render({"secrets": {"certificates": "cert-manager", "days": days}})
    hours = {
        each["metadata"]["name"]: int(each["spec"]["duration"].removesuffix("h"))
        for each in made
        if each["kind"] == "Certificate"
    }
    authority = hours.pop("rel-baton-ca")
    assert authority == max(days, 365) * 24 and len(hours) == 5
    assert all(each <= authority / 3 for each in hours.values())


def test_redis_is_told_what_compose_tells_it():
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["redis"]
    redis = container(dict(pods(render(CASES[0])))["redis"])
    words = {"/run/secrets/redis.crt": "/run/secrets/tls/tls.crt", "/run/secrets/redis.key": "/run/secrets/tls/tls.key"}
    words |= {
        "/run/secrets/ca.crt": "/run/secrets/tls/ca.crt",
        "/run/secrets/redis.acl": "/run/secrets/redis/redis.acl",
    }
    assert redis["command"][:2] == ["sh", "-c"]
    assert [*redis["command"][3:], *redis["args"]] == [words.get(word, word) for word in compose["command"]]
    assert redis["image"] == compose["image"]


def test_variables_reach_gateways_and_workers():
    """A collector's token is in a Secret."""
    token = {"secretKeyRef": {"name": "collector", "key": "headers"}}
    environment = {"OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_HEADERS": token}
    objects = render({"otlpEndpoint": "https://c:4317", "env": environment})
    check(objects)
    for component in (GATEWAY, *WORKER):
        assert container(dict(pods(objects))[component])["env"] == [
            {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "https://c:4317"},
            {"name": "OTEL_EXPORTER_OTLP_HEADERS", "valueFrom": token},
            {"name": "OTEL_METRICS_EXPORTER", "value": "none"},
        ]


def test_variables_have_the_names_that_they_are_given():
    """YAML takes NO and Y for false and true."""
    env = {"NO": "1", "Y": "no"}
    objects = render({"env": env})
    check(objects)
    for component in (GATEWAY, *WORKER):
        told = container(dict(pods(objects))[component])["env"]
        assert {each["name"]: each["value"] for each in told} == env


def test_devices_are_limits_and_a_gpu_is_asked_for_by_name():
    templates = dict(pods(render(next(path for path in CASES if path.stem == "gpu"))))
    prefill, decode = container(templates["prefill"]), container(templates["decode"])
    assert prefill["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == 1
    assert (decode["resources"]["limits"]["nvidia.com/gpu"], decode["resources"]["limits"]["rdma/hca"]) == (1, 1)
    assert "--device=cuda" in prefill["args"] and "--device=cuda" in decode["args"]


def test_ranks_on_gpus_have_shared_memory():
    """NCCL's, where GPUs do not reach each other: of 64 MiB, as pods have it by themselves, it found no space."""
    decode = {"gpu": {"count": 4}, "flags": {"tensor-parallel": 4}}
    templates = dict(pods(render({"workers": {"prefill": {"gpu": {"count": 1}}, "decode": decode}})))
    shared = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    for role, has_it in (("decode", True), ("prefill", False)):
        mounts = {each["name"]: each["mountPath"] for each in container(templates[role])["volumeMounts"]}
        volumes = [each for each in templates[role]["spec"]["volumes"] if each["name"] == "shm"]
        assert (mounts.get("shm") == "/dev/shm") is has_it and volumes == [shared] * has_it


@pytest.mark.parametrize(
    "worker, threads",
    [
        ({}, "--threads=2"),
        ({"resources": {"requests": {"cpu": 3.5}}}, "--threads=4"),
        ({"resources": {"limits": {"cpu": "16"}}}, "--threads=16"),
        ({"resources": {"limits": {"cpu": "2500m"}}}, "--threads=3"),
        ({"resources": {"limits": {"cpu": 6}}, "flags": {"tensor-parallel": 2}}, "--threads=3"),
        ({"flags": {"tensor-parallel": 2, "pipeline-parallel": 2}}, "--threads=1"),
        ({"resources": {"limits": {"cpu": 6}}, "flags": {"pipeline-parallel": 3, "remote-stages": 1}}, "--threads=3"),
        ({"flags": {"threads": 8}}, "--threads=8"),
        ({"flags": {"config": "/model/worker.toml"}}, None),
        ({"resources": {"requests": {"cpu": None}}}, None),
        ({"gpu": {"count": 1}}, None),
    ],
)
def test_a_worker_computes_by_as_many_threads_as_its_pod_has_cores(worker, threads):
    """Pods of one node share no folder, so that each would take all cores of it."""
    templates = dict(pods(render({"workers": {"decode": worker}})))
    assert [word for word in container(templates["decode"])["args"] if "--threads" in word] == [threads] * bool(threads)


@pytest.mark.parametrize("name", ["BATON_THREADS", "OMP_NUM_THREADS"])
def test_a_variable_says_how_many_threads(name):
    """It counts for less than a flag."""
    for role, template in pods(render({"env": {name: "6"}})):
        assert role not in WORKER or not any("--threads" in word for word in container(template)["args"])


def test_values_of_a_release_before_the_operators_make_the_same_chart():
    """`helm upgrade --reuse-values` gives those of the chart before: what is new in this one is not there."""
    assert render({"networkPolicy": {"operators": None}}) == render({})


def test_operators_are_let_in_by_gateways_and_workers():
    peer = {"podSelector": {"matchLabels": {"app": "scaler"}}}
    objects = render({"networkPolicy": {"operators": [peer]}})
    for component, port in (("gateway", 50052), ("prefill", 50061), ("decode", 50062)):
        rules = named(objects, "NetworkPolicy", component)["spec"]["ingress"]
        assert peer in next(rule["from"] for rule in rules if rule["ports"] == [{"port": port}])


@pytest.mark.parametrize("count, ports", [(0, [50063]), (1, [50063]), (2, [50063, 50064])])
def test_workers_are_let_in_where_the_others_give_kv(count, ports):
    """Each GPU's at a port of its own, with a certificate; at any port where KV may go in plain text."""
    worker = {"gpu": {"count": count}, "flags": {"tensor-parallel": count or 1}}
    objects = render({"workers": {"prefill": worker, "decode": {"flags": {"insecure-kv": True}}}})
    policies = [named(objects, "NetworkPolicy", role)["spec"] for role in WORKER]
    workers = [{"podSelector": each["podSelector"]} for each in policies]
    assert {"ports": [{"port": port} for port in ports], "from": workers} in policies[0]["ingress"]
    assert {"from": workers} in policies[1]["ingress"]
    argv = container(dict(pods(objects))["prefill"])["args"]
    assert int(parsed("prefill_worker", argv).kv_port) == ports[0]


@pytest.mark.parametrize(
    "wrong, told",
    [
        ("gateway.replica=3", "replica"),
        ("workers.kind=StatefulSet", "kind"),
        ("workers.decode.replicas=0", "replicas"),
        ("secrets.certificates=none", "certificates"),
        ("workers.decode.flags.kv-port=50070", "workers.decode.flags.kv-port: the chart gives 50063, .* leave it out"),
        ("workers.kind=DisaggregatedSet,autoscaling.enabled=true", "take workers.kind=Deployment"),
        (
            "otlpEndpoint=http://c:4317,env.OTEL_EXPORTER_OTLP_ENDPOINT=http://d:4317",
            "otlpEndpoint and env.OTEL_EXPORTER_OTLP_ENDPOINT: .* give one of both",
        ),
        (
            "workers.kind=DisaggregatedSet,workers.prefill.replicas=null",
            "workers.prefill.replicas: .* take workers.kind=",
        ),
    ],
)
def test_wrong_values_are_refused_by_name(wrong, told):
    with pytest.raises(ChartError, match=told):
        render({}, "--set", wrong)


def test_no_container_may_more_than_it_must():
    for values in CASES:
        for _, template in pods(render(values)):
            security = container(template)["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]} and template["spec"]["securityContext"]["runAsNonRoot"]
            limits = container(template)["resources"]["limits"]
            assert "memory" in limits


def test_lint_and_package(tmp_path):
    """A packaged chart has the rules and dashboards themselves, where the tree has links to them."""
    helm("lint", "--strict", CHART)
    helm("package", CHART, "--destination", tmp_path)
    (archive,) = tmp_path.glob("*.tgz")
    with tarfile.open(archive) as tar:
        held = {entry.name: entry for entry in tar}
        for folder, link in (("prometheus/rules", "rules"), ("grafana/dashboards", "dashboards")):
            for path in (ROOT / "deploy" / folder).iterdir():
                entry = held[f"baton/files/{link}/{path.name}"]
                assert entry.isfile() and tar.extractfile(entry).read() == path.read_bytes()


def test_a_number_of_workers_may_be_left_to_who_scales_them():
    """What the chart says is what every upgrade would set again."""
    objects = render({"workers": {"prefill": {"replicas": None}, "decode": {"replicas": 3}}})
    assert "replicas" not in named(objects, "Deployment", "prefill")["spec"]
    assert named(objects, "Deployment", "decode")["spec"]["replicas"] == 3
    check(objects)
    decode = {"replicas": None, "scale": {"minReplicas": 2}}
    objects = render({"workers": {"decode": decode}, "autoscaling": {"enabled": True}})
    assert named(objects, "ScaledObject", "decode")["spec"]["fallback"]["replicas"] == 2
    check(objects)


def test_scaling_is_of_the_deployments_that_there_are():
    objects = render(next(path for path in CASES if path.stem == "gpu"))
    for role in WORKER:
        scaled = named(objects, "ScaledObject", role)["spec"]
        target = named(objects, "Deployment", scaled["scaleTargetRef"]["name"].rpartition("-")[2])
        assert "replicas" not in target["spec"]  # or a rollout would undo what was scaled


def test_a_role_goes_to_its_minimum_only_where_somebody_says_that_nothing_runs():
    """What is not scraped has no answer, which is an error of KEDA's and changes nothing."""
    for name, asked in scaling().items():
        assert asked["ignoreNullValues"] == "false"
        if name == "kv":
            assert "up{" not in asked["query"], (
                "a worker that still reads its model is up, and has no blocks to tell of"
            )
            continue
        told = re.search(r'or on\(\) 0 \* \(sum\(up\{(job="baton-\w+"),namespace="llm"\}\) > 0\)$', asked["query"])
        assert told and asked["query"].count(told[1]) >= 2


def scaling() -> dict[str, dict]:
    """Return what each trigger asks, by its name."""
    objects = render(next(path for path in CASES if path.stem == "gpu"))
    triggers = [each for role in WORKER for each in named(objects, "ScaledObject", role)["spec"]["triggers"]]
    return {each["name"]: each["metadata"] for each in triggers}


GATEWAY_UP, DECODE_UP = 'up{job="baton-gateway",namespace="llm"}', 'up{job="baton-decode",namespace="llm"}'


@pytest.mark.long
@pytest.mark.parametrize(
    "series, wishes",
    [
        ({}, {}),
        ({GATEWAY_UP: "0x60", DECODE_UP: "0x60"}, {}),
        ({GATEWAY_UP: "1x60"}, {"queue": 0, "ttft": 0, "tpot": 0}),
        ({DECODE_UP: "1x60"}, {}),
        (
            {
                DECODE_UP: "1x60",
                'baton_kv_blocks{job="baton-decode",namespace="llm",holder="running"}': "0x60",
                'baton_kv_blocks{job="baton-decode",namespace="llm",holder="free"}': "40x60",
            },
            {"kv": 0},
        ),
        (
            {
                GATEWAY_UP: "1x60",
                'baton_slo_requests_total{job="baton-gateway",namespace="llm"}': "0+10x60",
                'baton_slo_missed_total{job="baton-gateway",namespace="llm",objective="ttft"}': "0+5x60",
                'baton_kv_blocks{job="baton-decode",namespace="llm",holder="running"}': "30x60",
                'baton_kv_blocks{job="baton-decode",namespace="llm",holder="free"}': "10x60",
            },
            {"queue": 0, "ttft": 0.5, "tpot": 0, "kv": 0.75},
        ),
    ],
)
def test_what_prometheus_answers(series, wishes, tmp_path):
    samples = {name: [{"labels": "{}", "value": value}] for name, value in wishes.items()}
    cases = [
        {"expr": asked["query"], "eval_time": "10m", "exp_samples": samples.get(name, [])}
        for name, asked in scaling().items()
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "15s", "input_series": given, "promql_expr_test": cases}
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    promtool("test", "rules", path)
