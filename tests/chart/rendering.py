"""helm and promtool as functions, and what is looked for in the objects that helm makes."""

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.process import ROOT

CHART = ROOT / "deploy" / "helm"
CASES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
RELEASE, NAMESPACE = "rel", "llm"
Object = dict[str, Any]


class ChartError(Exception):
    """What helm said."""


def helm(*argv: object, input: str | None = None) -> str:
    """Raises ChartError where it fails."""
    own = Path(sys.executable).with_name("helm")
    program = str(own) if own.exists() else shutil.which("helm")
    assert program is not None, "there is no helm: `make test` installs it by .ci/helm"
    done = subprocess.run([program, *map(str, argv)], input=input, capture_output=True, text=True)
    if done.returncode:
        raise ChartError(done.stderr)
    return done.stdout


def promtool(*argv: object) -> None:
    """Expect it to find nothing wrong."""
    done = subprocess.run(["promtool", *map(str, argv)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def render(values: Path | Object, *argv: str) -> list[Object]:
    """Return the chart's objects for a file of values, or for values."""
    text = values.read_text() if isinstance(values, Path) else json.dumps(values)
    return [each for each in yaml.load_all(_rendered(text, argv), yaml.CSafeLoader) if each]


@functools.cache
def _rendered(values: str, argv: tuple[str, ...]) -> str:
    """What helm prints, asked once for the same values."""
    return helm("template", RELEASE, CHART, "--namespace", NAMESPACE, "--values", "-", *argv, input=values)


def named(objects: list[Object], kind: str, suffix: str = "") -> Object:
    name = f"{RELEASE}-baton{suffix and '-'}{suffix}"
    return next(each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Yield each pod's component and template."""
    for each in objects:
        if each["kind"] in ("Deployment", "Job"):
            templates = [each["spec"]["template"]]
        elif each["kind"] == "DisaggregatedSet":
            templates = [role["spec"]["leaderWorkerTemplate"]["workerTemplate"] for role in each["spec"]["roles"]]
        else:
            templates = []
        for template in templates:
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template


def container(template: Object) -> Object:
    (only,) = template["spec"]["containers"]
    return only
