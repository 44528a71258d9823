"""One attempt of a request: a decode leg, a prefill leg if one is needed, and the KV that moves between them."""

import itertools
import secrets
from collections.abc import Callable, Sequence

from baton.protocol import PREFILL_ON_ADMIT
from baton.service.clock import now
from baton.service.codec import budget_ms
from baton.v1 import worker_pb2 as pb
from gateway.attempts.counted_load import CountedLoad
from gateway.attempts.kv_fetch import KVFetch
from gateway.attempts.prefix_source import PrefixSource
from gateway.link.mailbox import Mailbox
from gateway.link.worker_leg import Key, WorkerLeg
from gateway.link.worker_link import WorkerLink
from gateway.request.request_record import RequestRecord
from gateway.request.request_spec import make_taker

# Attempts of this process are numbered from a random start, so that a request id that is used again gets new keys.
_numbers = itertools.count(secrets.randbits(31))


def new_key(key_id: str) -> Key:
    """Return a key for this request that no worker knows yet."""
    return key_id, next(_numbers) & 0xFFFFFFFF


class Attempt:
    """Open legs on workers, and send their commands; `kv_fetch` is the fetch of the prompt's KV, `load` the work that
    is counted for the attempt.

    `decode` is None until a decode worker is asked for credit, and `prefill` until a prefill worker is asked to read
    the prompt."""

    __slots__ = (
        "decode",
        "prefill",
        "chosen_at",
        "prefill_link",
        "prefix_holder",
        "spec",
        "fingerprint",
        "output_ids",
        "num_granted_tokens",
        "kv_fetch",
        "load",
        "is_decoding",
        "has_stepped",
        "prefills_on_admit",
        "_prefix_source",
        "_key_id",
        "_mailbox",
        "_record",
        "_deadline",
    )

    def __init__(self, key_id: str, mailbox: Mailbox, record: RequestRecord, deadline: float):
        """`deadline`: when the request ends (time.monotonic())."""
        self.decode: WorkerLeg | None = None
        self.prefill: WorkerLeg | None = None
        self.chosen_at = 0.0  # when the decode worker was chosen (time.monotonic())
        self.prefill_link: WorkerLink | None = None  # the worker that prefills; None: the decode worker does
        self.prefix_holder: WorkerLink | None = None  # gives a prefix to the worker that reads the prompt
        self.spec: pb.RequestSpec | None = None  # None again once the answer has begun
        self.fingerprint = b""  # of the spec
        self.output_ids: Sequence[int] = ()  # the tokens of earlier attempts that the spec carries
        self.num_granted_tokens = 0  # tokens of the prompt that the decode worker has cached
        self.kv_fetch = KVFetch()
        self.load = CountedLoad()
        self.is_decoding = False  # decode steps run, or may run as soon as the KV is there
        self.has_stepped = False
        self.prefills_on_admit = False  # Admit asked the decode worker to prefill
        self._prefix_source: PrefixSource | None = None
        self._key_id, self._mailbox, self._record, self._deadline = key_id, mailbox, record, deadline

    @property
    def prefilling_leg(self) -> WorkerLeg:
        """The leg whose worker reads the prompt."""
        return self.prefill or self.decode

    @property
    def kv_source(self) -> WorkerLink | None:
        """The worker from which the decode worker gets KV of the prompt, or of its beginning, if there is one."""
        return self.prefill_link or self.prefix_holder

    @property
    def has_lost_decode_worker(self) -> bool:
        """Return whether the session with the decode worker has ended.

        Events that were posted before Lost are handled while the link already has no worker, or another one."""
        return self.decode.link.worker_id != self.decode.worker_id

    def admit(self, link: WorkerLink, prefills_on_admit: bool) -> None:
        """Ask a decode worker for credit, and, if `prefills_on_admit`, to prefill as soon as it has granted it."""
        self.chosen_at = now()
        self.decode = link.open(new_key(self._key_id), self._mailbox, self._record.tenant)
        self.decode.set_slo(self._record.routing_request.slo.tpot_s)
        self.prefills_on_admit = prefills_on_admit and PREFILL_ON_ADMIT in link.limits.features
        self.decode.send(admit=pb.Admit(spec=self.spec, prefill=self.prefills_on_admit))

    def drop_decode(self) -> None:
        """Close the decode leg: its worker has refused, or no worker can prefill for it."""
        self.close()
        self.decode = None

    def prefill_on_decode_worker(
        self, holder: WorkerLink | None, hashes: Sequence[bytes], on_offer: Callable[[], None]
    ) -> None:
        """Have the decode worker prefill the prompt, after it has pulled the spans `hashes` from `holder`, if any.

        `on_offer` is called if the holder offers its KV in time."""
        self.prefix_holder = holder
        self.decode.num_prefill_tokens = len(self.spec.token_ids) - self.num_granted_tokens
        if self.prefills_on_admit:
            return
        self._prefix_source = PrefixSource(self._send_local_prefill, on_offer)
        self._prefix_source.ask(holder, self.decode.link, hashes, new_key(self._key_id), self._deadline)

    def prefill_on_prefill_worker(
        self, holder: WorkerLink | None, hashes: Sequence[bytes], num_matched: int, on_offer: Callable[[], None]
    ) -> None:
        """Have `prefill_link`, which holds `num_matched` tokens of it, prefill the prompt; it pulls the spans `hashes`
        from `holder`, if any.

        `on_offer` is called if the holder offers its KV in time."""
        self.prefix_holder = holder
        self.prefill = self.prefill_link.open(self.decode.key, self._mailbox, self._record.tenant)
        self.prefill.num_prefill_tokens = len(self.spec.token_ids) - num_matched
        self._prefix_source = PrefixSource(self._send_prefill, on_offer)
        self._prefix_source.ask(holder, self.prefill_link, hashes, new_key(self._key_id), self._deadline)

    def drop_prefill(self) -> None:
        """Close the prefill leg: its worker has refused."""
        self.prefill.close()
        self._prefix_source.close()
        self.prefill = self._prefix_source = None

    def fetch(self, accepted: pb.Accepted) -> None:
        """Have the decode worker pull the prompt's KV from the prefill worker."""
        self.kv_fetch.begin(accepted.lease_id)
        self.decode.send(fetch=pb.Fetch(handle=accepted.handle, ticket=accepted.ticket))

    def prefill_rest(self) -> None:
        """Have the decode worker read the part of the prompt behind the prefix that it has pulled."""
        self.decode.send(prefill=pb.Prefill())

    def note_fetched(self) -> None:
        """Note that the decode worker has all KV of the prompt."""
        self.kv_fetch.is_done = True
        if self.prefill is not None:
            self.prefill.note_success()

    def renew_lease(self) -> None:
        """Have the prefill worker keep the KV for longer, and set when to renew the lease again."""
        self.kv_fetch.note_renewed()
        self.prefill.send(renew_lease=pb.RenewLease(lease_id=self.kv_fetch.lease_id))

    def doubt_fetch(self) -> None:
        """Give an unfinished fetch little time: its source may be gone, or may live without a session to this
        gateway."""
        if self.prefill_link is not None:
            self.kv_fetch.doubt()

    def start(self, first_tokens: Sequence[pb.FirstToken]) -> None:
        """Have the decode worker decode behind `first_tokens`, if another worker computed them, and forget the prompt.

        The prompt would be most of the memory that an open stream takes."""
        if first_tokens and self.prefill_link is not None:
            self.decode.send(start=pb.Start(first_tokens=first_tokens))
        self.spec = None
        self.is_decoding = bool(first_tokens)

    def resume(self, leg: WorkerLeg) -> None:
        """Continue with `leg`, which is attached to a running sequence that has all its KV."""
        self.decode = leg
        self.decode.set_slo(self._record.routing_request.slo.tpot_s)
        self.is_decoding = self.kv_fetch.is_done = True

    def close(self) -> None:
        """Close all legs. Idempotent."""
        for leg in (self.decode, self._prefix_source, self.prefill):
            if leg is not None:
                leg.close()
        self._prefix_source = None  # it refers back to this object: kept, both would wait for the garbage collector
        self.kv_fetch.lease_id = b""

    def _send_local_prefill(self, sources: list[pb.KVSource], holder: str | None) -> None:
        """Have the decode worker pull the prefix that a holder offers; without an offer, have it prefill now."""
        self._record.source = holder
        if sources:
            self.decode.send(fetch=pb.Fetch(handle=sources[0].handle, ticket=sources[0].ticket))
        else:
            self.prefill_rest()

    def _send_prefill(self, sources: list[pb.KVSource], holder: str | None) -> None:
        if self.spec is None or self.has_lost_decode_worker:
            return
        self._record.source = holder
        self.spec.budget_ms = budget_ms(self._deadline)
        taker = make_taker(self.decode.link)
        self.prefill.send(prefill=pb.Prefill(spec=self.spec, taker=taker, sources=sources))
