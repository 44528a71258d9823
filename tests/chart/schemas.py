"""The fields of others' objects that the chart uses, by their definitions in the projects' sources; nothing else may be
set.

KEDA 2.20, cert-manager 1.18, Prometheus operator 0.85, LeaderWorkerSet 0.9.
"""

from typing import Any

TEXT, WHOLE, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


def only(**properties: Any) -> dict[str, Any]:
    """All of them, and no other."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def some(**properties: Any) -> dict[str, Any]:
    """Any of them, and no other."""
    return only(**properties) | {"required": []}


def many(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


_LABELS = {"type": "object", "additionalProperties": TEXT}
_POLICY = only(type={"enum": ["Pods", "Percent"]}, value=WHOLE, periodSeconds=WHOLE)
_SCALING = only(stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600}, policies=many(_POLICY))
_TRIGGER = only(
    type={"const": "prometheus"},
    name=TEXT,
    metricType={"enum": ["Value", "AverageValue"]},
    metadata=only(serverAddress=TEXT, query=TEXT, threshold=TEXT, ignoreNullValues={"enum": ["true", "false"]}),
)
_ISSUER = some(name=TEXT, kind={"enum": ["Issuer", "ClusterIssuer"]}, group=TEXT)
_USAGES = {"enum": ["digital signature", "server auth", "client auth"]}
_RULE = some(
    alert=TEXT,
    record=TEXT,
    expr=TEXT,
    **{"for": {"type": "string", "pattern": "^[0-9]+[smh]$"}},
    labels=_LABELS,
    annotations=_LABELS,
)
_GROUP = only(
    size={"type": "integer", "minimum": 1},
    restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
    workerTemplate={"type": "object"},  # a pod's template, which is held against Kubernetes' own schema
)
_ROLE = only(
    name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
    spec=only(
        replicas=WHOLE,
        rolloutStrategy=only(
            type={"const": "RollingUpdate"}, rollingUpdateConfiguration=only(maxSurge=WHOLE, maxUnavailable=WHOLE)
        ),
        leaderWorkerTemplate=_GROUP,
    ),
)

SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("keda.sh/v1alpha1", "ScaledObject"): only(
        scaleTargetRef=only(name=TEXT),
        pollingInterval=WHOLE,
        minReplicaCount=WHOLE,
        maxReplicaCount=WHOLE,
        fallback=only(failureThreshold=WHOLE, replicas=WHOLE, behavior={"enum": ["static", "currentReplicas"]}),
        advanced=only(horizontalPodAutoscalerConfig=only(behavior=only(scaleUp=_SCALING, scaleDown=_SCALING))),
        triggers=many(_TRIGGER),
    ),
    ("cert-manager.io/v1", "Issuer"): {"oneOf": [only(selfSigned=only()), only(ca=only(secretName=TEXT))]},
    ("cert-manager.io/v1", "Certificate"): some(
        isCA=FLAG,
        commonName={"type": "string", "maxLength": 64},
        secretName=TEXT,
        duration={"type": "string", "pattern": "^[0-9]+h$"},
        renewBefore={"type": "string", "pattern": "^[0-9]+h$"},
        privateKey=some(algorithm={"enum": ["ECDSA"]}, size=WHOLE, rotationPolicy={"enum": ["Always", "Never"]}),
        usages=many(_USAGES),
        dnsNames=many(TEXT),
        ipAddresses=many(TEXT),
        issuerRef=_ISSUER,
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): only(
        jobLabel=TEXT,
        selector=only(matchLabels=_LABELS, matchExpressions=many(only(key=TEXT, operator={"enum": ["Exists"]}))),
        endpoints=many(only(port=TEXT, interval=TEXT)),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): only(groups=many(only(name=TEXT, rules=many(_RULE)))),
    ("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet"): only(roles=many(_ROLE) | {"minItems": 2, "maxItems": 10}),
}
