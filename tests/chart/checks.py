"""What every chart is held against: the schemas, and the flags of the processes themselves."""

import argparse
import copy
from pathlib import Path

import jsonschema
import kubernetes_validate.utils

from baton.service.settings import add_flags, make_parser
from baton.worker.settings import WorkerSettings
from gateway.config.settings import GatewaySettings
from tests.chart.rendering import pods
from tests.chart.schemas import SPECS

KUBERNETES = "1.37"
GATEWAY, WORKER = "gateway", ("prefill", "decode")


def check(objects: list[dict]) -> None:
    """Hold every object, and every pod in an object of others, against its schema."""
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))
    for each in objects:
        assert len(each["metadata"]["name"]) <= 63
        spec = SPECS.get((each["apiVersion"], each["kind"]))
        if spec is None:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
        else:
            jsonschema.validate(each["spec"], spec)
    for component, template in pods(objects):
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
        pod["metadata"]["name"] = component
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def parsed(module: str, argv: list[str]) -> argparse.Namespace:
    """By the process's own parser, whose wrong use ends the test."""
    cls = GatewaySettings if module == "gateway" else WorkerSettings
    parser = make_parser(module, "")
    parser.add_argument("--config", type=Path)
    add_flags(parser, cls)
    return parser.parse_args(argv)
