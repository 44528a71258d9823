"""Make one request part of your own trace: python examples/trace.py [HOST:PORT].

Send W3C `traceparent` as metadata. With OTEL_EXPORTER_OTLP_ENDPOINT set for the stack, its spans (route, prefill, KV
transfer, decode) arrive at that collector under this trace id; without a collector the same phases are in the answer's
`timing`."""

import secrets
import sys

from baton.client import CallError, Client


def main(target: str = "127.0.0.1:50051", trace_id: str = "") -> None:
    trace_id = trace_id or secrets.token_hex(16)
    metadata = [("traceparent", f"00-{trace_id}-{secrets.token_hex(8)}-01")]
    with Client(target, timeout_s=30) as client:
        try:
            answer = client.generate("import ", max_tokens=16, metadata=metadata)
        except CallError as error:
            sys.exit(f"{target}: {error}")
    print(f"trace {trace_id}")
    for field, value in answer.timing.ListFields():
        if field.name == "bound_s":  # the same time once more, by what was waited for
            continue
        print(f"{field.name:20} {value * 1000:8.2f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
