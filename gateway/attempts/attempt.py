"""One attempt of a request: a decode leg, where needed a prefill leg, and the KV that moves between them."""

import itertools
import secrets
from collections.abc import Callable, Sequence

from baton.protocol import PREFILL_ON_ADMIT
from baton.service.clock import now
from baton.service.codec import budget_ms
from baton.v1 import worker_pb2 as pb
from gateway.attempts.prefix_source import PrefixSource
from gateway.link.mailbox import Mailbox
from gateway.link.worker_leg import Key, WorkerLeg
from gateway.link.worker_link import WorkerLink
from gateway.request.request_record import RequestRecord
from gateway.request.request_spec import make_taker

_RENEW_S = 1.5  # of a lease, which lasts for LEAST_LEASE_S (baton/worker/settings.py) or longer
_DOUBT_S = 1.0  # how long a fetch may still take once its source has lost its session with this gateway

# Attempts are numbered through this process, from a random start: a request id that is used again gets new keys.
_numbers = itertools.count(secrets.randbits(31))


def new_key(key_id: str) -> Key:
    """Return a key of this request that no worker knows yet."""
    return key_id, next(_numbers) & 0xFFFFFFFF


class Attempt:
    """Open legs on workers, send their commands, and keep what is known of them.

    `decode` is None until credit is asked for, `prefill` until a prefill worker is asked to read the prompt."""

    __slots__ = (
        "decode",
        "prefill",
        "chosen_at",
        "prefill_link",
        "counted_prefill_link",
        "prefix_holder",
        "spec",
        "fingerprint",
        "output_ids",
        "num_granted_tokens",
        "is_fetched",
        "is_decoding",
        "has_stepped",
        "doubt_until",
        "renew_at",
        "_lease_id",
        "prefills_on_admit",
        "_prefix_source",
        "_key_id",
        "_mailbox",
        "_record",
        "_deadline",
    )

    def __init__(self, key_id: str, mailbox: Mailbox, record: RequestRecord, deadline: float):
        """`deadline`: time.monotonic() at which the request ends."""
        self.decode: WorkerLeg | None = None
        self.prefill: WorkerLeg | None = None
        self.chosen_at = 0.0  # when the decode worker was (time.monotonic())
        self.prefill_link: WorkerLink | None = None  # chosen to prefill; None: the decode worker does
        self.counted_prefill_link: WorkerLink | None = None  # of whose recent work reading the prompt is a part
        self.prefix_holder: WorkerLink | None = None  # gives a prefix to the worker that reads the prompt
        self.spec: pb.RequestSpec | None = None  # until the answer begins
        self.fingerprint = b""  # of the spec
        self.output_ids: Sequence[int] = ()  # that the spec carries
        self.num_granted_tokens = 0  # that the decode worker has cached
        self.is_fetched = False
        self.is_decoding = False  # decode steps run, or could
        self.has_stepped = False
        self.doubt_until: float | None = None  # when a fetch is given up whose source may be gone
        self.renew_at = 0.0  # when the lease is to be renewed (time.monotonic())
        self._lease_id = b""
        self.prefills_on_admit = False  # the decode worker was asked to with Admit
        self._prefix_source: PrefixSource | None = None
        self._key_id, self._mailbox, self._record, self._deadline = key_id, mailbox, record, deadline

    @property
    def prefilling_leg(self) -> WorkerLeg:
        """The leg whose worker reads the prompt."""
        return self.prefill or self.decode

    @property
    def kv_source(self) -> WorkerLink | None:
        """The worker that gives the decode worker KV of the prompt, or of its beginning, if any."""
        return self.prefill_link or self.prefix_holder

    @property
    def has_lease(self) -> bool:
        """Return whether the prefill worker keeps KV that is not fetched yet."""
        return bool(self._lease_id) and not self.is_fetched

    @property
    def is_in_doubt(self) -> bool:
        """Return whether the source of an unfinished fetch may be gone."""
        return self.doubt_until is not None and not self.is_fetched

    @property
    def has_lost_decode_worker(self) -> bool:
        """Return whether the session with the decode worker has ended. What comes before Lost in the mailbox finds a
        link that says nothing of its worker any more."""
        return self.decode.link.worker_id != self.decode.worker_id

    def admit(self, link: WorkerLink, prefills_on_admit: bool) -> None:
        """Ask a decode worker for credit; if `prefills_on_admit` to prefill as soon as it has granted that."""
        self.chosen_at = now()
        self.decode = link.open(new_key(self._key_id), self._mailbox, self._record.tenant)
        self.decode.set_slo(self._record.routing_request.slo.tpot_s)
        self.prefills_on_admit = prefills_on_admit and PREFILL_ON_ADMIT in link.limits.features
        self.decode.send(admit=pb.Admit(spec=self.spec, prefill=self.prefills_on_admit))

    def drop_decode(self) -> None:
        """Close the decode leg, whose worker has refused, or cannot be given the prompt."""
        self.close()
        self.decode = None

    def prefill_on_decode_worker(
        self, holder: WorkerLink | None, hashes: Sequence[bytes], on_offer: Callable[[], None]
    ) -> None:
        """Have the decode worker prefill the prompt, after it has pulled the spans `hashes` from `holder`, if any;
        `on_offer` is called where it does."""
        self.prefix_holder = holder
        self.decode.num_prefill_tokens = len(self.spec.token_ids) - self.num_granted_tokens
        if self.prefills_on_admit:
            return
        self._prefix_source = PrefixSource(self._send_local_prefill, on_offer)
        self._prefix_source.ask(holder, self.decode.link, hashes, new_key(self._key_id), self._deadline)

    def prefill_on_prefill_worker(
        self, holder: WorkerLink | None, hashes: Sequence[bytes], num_matched: int, on_offer: Callable[[], None]
    ) -> None:
        """Have `prefill_link`, which holds `num_matched` tokens, prefill the prompt; it may pull `hashes` from
        `holder`; `on_offer` is called where it does."""
        self.prefix_holder = holder
        self.prefill = self.prefill_link.open(self.decode.key, self._mailbox, self._record.tenant)
        self.prefill.num_prefill_tokens = len(self.spec.token_ids) - num_matched
        self._prefix_source = PrefixSource(self._send_prefill, on_offer)
        self._prefix_source.ask(holder, self.prefill_link, hashes, new_key(self._key_id), self._deadline)

    def drop_prefill(self) -> None:
        """Close the prefill leg, whose worker has refused."""
        self.prefill.close()
        self._prefix_source.close()
        self.prefill = self._prefix_source = None

    def fetch(self, accepted: pb.Accepted) -> None:
        """Have the decode worker pull the prompt's KV from the prefill worker."""
        self._lease_id, self.renew_at = accepted.lease_id, now() + _RENEW_S
        self.decode.send(fetch=pb.Fetch(handle=accepted.handle, ticket=accepted.ticket))

    def prefill_rest(self) -> None:
        """Have the decode worker read what the prefix that it has pulled leaves of the prompt."""
        self.decode.send(prefill=pb.Prefill())

    def note_fetched(self) -> None:
        """The decode worker has all KV of the prompt."""
        self.is_fetched = True
        if self.prefill is not None:
            self.prefill.note_success()

    def renew_lease(self) -> None:
        """Have the prefill worker keep the KV for longer."""
        self.renew_at = now() + _RENEW_S
        self.prefill.send(renew_lease=pb.RenewLease(lease_id=self._lease_id))

    def doubt_fetch(self) -> None:
        """Give an unfinished fetch little time: its source may be gone, or live on without a session to this
        gateway. Later doubts give it no more."""
        if self.prefill_link is not None and not self.is_fetched and self.doubt_until is None:
            self.doubt_until = now() + _DOUBT_S

    def start(self, first_tokens: Sequence[pb.FirstToken]) -> None:
        """Decode behind these, where another worker has computed them; the prompt is forgotten here.

        It would be most of what an open stream takes in memory."""
        if first_tokens and self.prefill_link is not None:
            self.decode.send(start=pb.Start(first_tokens=first_tokens))
        self.spec = None
        self.is_decoding = bool(first_tokens)

    def resume(self, leg: WorkerLeg) -> None:
        """Decode in a leg that is attached to a running sequence, which has all its KV."""
        self.decode = leg
        self.decode.set_slo(self._record.routing_request.slo.tpot_s)
        self.is_decoding = self.is_fetched = True

    def close(self) -> None:
        """Close all legs. Idempotent."""
        for leg in (self.decode, self._prefix_source, self.prefill):
            if leg is not None:
                leg.close()
        self._prefix_source = None  # it calls back: kept, it would wait for the collector of circles
        self._lease_id = b""

    def _send_local_prefill(self, sources: list[pb.KVSource], holder: str | None) -> None:
        """Pull what another worker offers, and compute once it is there; without an offer compute at once."""
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
