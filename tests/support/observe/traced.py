"""A trace of one request, which must be one tree."""

import secrets

from tests.support.observe.otlp import Receiver, Span

PARENTS = {
    "route": "root",
    "admit": "root",
    "prefill": "root",
    "prefill.queue": "prefill",
    "prefill.compute": "prefill",
    "kv.transfer": "root",
    "decode": "root",
    "decode.queue": "decode",
    "decode.steps": "decode",
}
CLOCK_TOLERANCE_NS = 20_000_000  # between the pairings of monotonic and wall clock of two processes


class Traced:
    """A trace that the client begins: its ids, the metadata that carries them, and what came of it."""

    def __init__(self, receiver: Receiver):
        self.receiver = receiver
        self.trace_id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)
        self.metadata = (("traceparent", f"00-{self.trace_id}-{self.span_id}-01"),)

    def whole(self, *names: str) -> dict[str, Span]:
        """Wait for the root and for spans of these names, then for stragglers' time; check that it is one tree."""
        wanted = {"root", *names}
        self.receiver.wait_for(lambda _: wanted <= self._by_name().keys(), timeout_s=10)
        found = self._by_name()
        spans = self.receiver.trace(self.trace_id)
        assert len({span.span_id for span in spans}) == len(spans)
        root = found["root"]
        known = {span.span_id for span in spans}
        for span in spans:
            assert span is root or span.parent_id in known, f"{span.name} hangs below nothing"
            assert span.start_ns <= span.end_ns
            assert root.start_ns - CLOCK_TOLERANCE_NS <= span.start_ns, f"{span.name} began before the request"
        for name, span in found.items():
            if name in PARENTS:
                assert span.parent_id == found[PARENTS[name]].span_id, f"{name} hangs below the wrong span"
        return found

    def _by_name(self) -> dict[str, Span]:
        """Return spans by name; the root, which is below the client's own span, goes by "root"."""
        spans = self.receiver.trace(self.trace_id)
        return {"root" if span.parent_id == self.span_id else span.name: span for span in spans}
