"""What `baton doctor` finds out by itself: whether a collector can be reached as exporters reach it."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from baton.cli.cluster.findings import Findings, check_collector
from tests.support.security.installation import install


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """A collector that wants certificates of its clients: its URL, and the folder of all certificates."""
    folder = install(tmp_path_factory.mktemp("collector") / "certs").folder
    server = grpc.server(ThreadPoolExecutor(1))
    own = [((folder / "gateway.key").read_bytes(), (folder / "gateway.crt").read_bytes())]
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials(own, (folder / "ca.crt").read_bytes(), require_client_auth=True)
    )
    server.start()
    yield f"https://127.0.0.1:{port}", folder
    server.stop(None).wait()


OWN = {"CERTIFICATE": "ca.crt", "CLIENT_KEY": "decode.key", "CLIENT_CERTIFICATE": "decode.crt"}
OF_TRACES = {f"TRACES_{name}": file for name, file in OWN.items()}


@pytest.mark.parametrize(
    "files, words",
    [
        (OWN, "accepts connections from here"),
        (OF_TRACES, "accepts connections from here"),
        ({"CERTIFICATE": "decode.crt", **OF_TRACES}, "accepts connections from here"),
        ({**OWN, "TRACES_CERTIFICATE": "ca.crt"}, ""),  # the exporter shows none then
        ({**OWN, "CLIENT_KEY": "no.key"}, "OTEL_EXPORTER_OTLP_CLIENT_KEY: {}/no.key: No such file or directory"),
        ({**OF_TRACES, "TRACES_CERTIFICATE": "x"}, "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE: {}/x: No such file or directory"),
        (
            {"CERTIFICATE": "ca.crt", "CLIENT_KEY": "decode.key"},
            "OTEL_EXPORTER_OTLP_CLIENT_KEY and OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE go together: give both or none",
        ),
    ],
)  # fmt: skip
async def test_a_collector_is_shown_the_certificate_of_exporters(strict, monkeypatch, files, words):
    url, folder = strict
    for name, file in files.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", str(folder / file))
    report = Findings(is_json=True)
    await check_collector(url, report)
    (found,) = report.found
    assert found.status == ("ok" if words.startswith("accepts") else "warning"), found
    assert words.format(folder) in found.text
    assert found.advice.startswith("correct it for all processes") == words.startswith("OTEL_")
