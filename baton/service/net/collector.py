"""The address and credentials of the connection to an OpenTelemetry collector, from OpenTelemetry's variables."""

import os
from pathlib import Path
from typing import Literal

import grpc

Signal = Literal["TRACES", "METRICS"]


def collector_endpoint(signal: Signal) -> str:
    """Return the URL of the collector of `signal`; empty if none is set, or if the variables switch sending off."""
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_off or os.environ.get(f"OTEL_{signal}_EXPORTER") == "none":
        return ""
    prefix = "OTEL_EXPORTER_OTLP_"
    return os.environ.get(f"{prefix}{signal}_ENDPOINT") or os.environ.get(f"{prefix}ENDPOINT") or ""


def is_insecure(endpoint: str) -> bool:
    return not endpoint.startswith("https://")


def collector_credentials(endpoint: str, signal: Signal) -> grpc.ChannelCredentials | None:
    """Return the credentials of the exporter of `signal`, or None if `endpoint` is not https. The variables of this
    signal apply if they name a certificate, else those for all signals. Raises ValueError if a variable names a file
    that cannot be read, or if only one of client key and certificate is given: gRPC would end the process for the
    latter, and OpenTelemetry's exporters ignore what they cannot read."""
    if is_insecure(endpoint):
        return None
    prefix = "OTEL_EXPORTER_OTLP_"
    if f"{prefix}{signal}_CERTIFICATE" in os.environ:
        prefix += f"{signal}_"
    if not os.environ.get(f"{prefix}CERTIFICATE"):
        return grpc.ssl_channel_credentials()
    names = [prefix + name for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")]
    roots, key, chain = map(_read_named, names)
    if (key is None) != (chain is None):
        raise ValueError(f"{names[1]} and {names[2]} go together: give both or none")
    return grpc.ssl_channel_credentials(roots, key, chain)


def _read_named(name: str) -> bytes | None:
    """Return the content of the file that a variable names; None if the variable is not set. Raises ValueError if the
    file cannot be read."""
    path = os.environ.get(name)
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise ValueError(f"{name}: {path}: {error.strerror}") from None
