"""Whatever values the schema lets through, objects are valid and flags are the processes' own."""

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.chart.checks import GATEWAY, WORKER, check, parsed
from tests.chart.rendering import container, pods, render

replicas, seconds = st.integers(1, 40), st.integers(1, 3599)
label = st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
labels = st.dictionaries(label, label, max_size=2)
device = st.fixed_dictionaries(
    {"count": st.integers(0, 8)}, optional={"resource": st.sampled_from(["nvidia.com/gpu", "nvidia.com/mig-1g.10gb"])}
)
quantities = st.fixed_dictionaries(
    {}, optional={"cpu": st.sampled_from(["1", "500m", "16"]), "memory": st.sampled_from(["1Gi", "512Mi"])}
)
worker_flags = st.fixed_dictionaries(
    {},
    optional={
        "max-num-seqs": st.integers(1, 4096),
        "batch-invariant": st.booleans(),
        "gpu-memory-utilization": st.floats(0.05, 0.95),
        "log-level": st.sampled_from(["debug", "info"]),
        "speculator": st.sampled_from(["off", "auto", "ngram"]),
    },
)
worker = st.fixed_dictionaries(
    {},
    optional={
        "replicas": replicas,
        "tag": label,
        "flags": worker_flags,
        "drainGraceS": seconds,
        "startS": st.integers(30, 7200),
        "resources": st.fixed_dictionaries({}, optional={"requests": quantities, "limits": quantities}),
        "gpu": device,
        "rdma": st.fixed_dictionaries({"count": st.integers(0, 2)}),
        "runtimeClassName": st.sampled_from(["", "nvidia"]),
        "nodeSelector": labels,
        "tolerations": st.sampled_from([[], [{"key": "gpu", "operator": "Exists"}]]),
        "maxUnavailable": st.integers(1, 5),
        "scale": st.fixed_dictionaries({"minReplicas": st.integers(1, 3), "maxReplicas": st.integers(3, 50)}),
    },
)
gateway = st.fixed_dictionaries(
    {},
    optional={
        "replicas": replicas,
        "http": st.booleans(),
        "drainGraceS": seconds,
        "flags": st.fixed_dictionaries(
            {}, optional={"split": st.sampled_from(["auto", "never"]), "stand-in": st.booleans()}
        ),
        "hpa": st.fixed_dictionaries({"enabled": st.booleans(), "targetCPUPercent": st.integers(1, 100)}),
    },
)
values_of_the_chart = st.fixed_dictionaries(
    {
        "workers": st.fixed_dictionaries(
            {"kind": st.sampled_from(["Deployment", "DisaggregatedSet"])}, optional=dict.fromkeys(WORKER, worker)
        )
    },
    optional={
        "gateway": gateway,
        "model": st.sampled_from([{}, {"path": "/model/m", "volume": {"persistentVolumeClaim": {"claimName": "m"}}}]),
        "env": st.dictionaries(
            st.from_regex(r"OTEL_[A-Z]{1,9}", fullmatch=True), st.text("ab: {}'\"\n", max_size=9), max_size=2
        ),
        "otlpEndpoint": st.sampled_from(["", "http://c:4317"]),
        "topologyKeys": st.lists(label, max_size=2, unique=True),
        "redis": st.fixed_dictionaries({"enabled": st.booleans()}),
        "secrets": st.fixed_dictionaries(
            {},
            optional={
                "certificates": st.sampled_from(["job", "cert-manager", "existing"]),
                "credentials": st.sampled_from(["job", "existing"]),
                "hosts": st.lists(label, max_size=2, unique=True),
            },
        ),
        "networkPolicy": st.fixed_dictionaries({"enabled": st.booleans(), "monitoring": st.just([])}),
        "monitoring": st.fixed_dictionaries({"enabled": st.booleans(), "labels": labels}),
    },
)


# Not shrunk: every attempt is a run of helm, and the values are in the error as they are.
@settings(
    max_examples=10,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.generate],
)
@given(values_of_the_chart, st.booleans())
def test_random_values_make_valid_objects(values, scaled):
    if values["workers"]["kind"] == "Deployment":
        values["autoscaling"] = {"enabled": scaled}
    objects = render(values)
    check(objects)
    for component, template in pods(objects):
        if component in (GATEWAY, *WORKER):
            process = container(template)
            parsed(process["command"][2], process["args"])
