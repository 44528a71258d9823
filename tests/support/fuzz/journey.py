"""One request of a world, from its first word to its last token, through as many attempts as it takes.

    whole    read and answered by one engine
    split    read by the other, whose lease is pulled as its watermark moves
    pull     what the other has cached is pulled, the rest is read here
    prefix   as split, but the prefill engine first pulls the prefix cached by the decode engine

A course is a generator: between two of its steps anything may happen to the key.
"""

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from baton.engine.core.request import (
    FinishReason,
    Key,
    Output,
    PrefillDone,
    Progress,
    Refusal,
    Request,
    RequestEnded,
    TokenLogprobs,
    TokenRun,
)
from baton.engine.engine import Engine
from kvtransfer.naming import SPAN_TOKENS, chain_hashes
from tests.support.engine.handover import going_on
from tests.support.engine.toy_engine import CHAIN_ROOT
from tests.support.fuzz.carrier import Lease

MAX_REFUSALS = 1000  # then it is refused, as a gateway would
REFUSALS_HOLDING = 20  # then what it holds meanwhile is given back: two may wait for each other

Course = Generator[None, None, Any]


class NoRoom(Exception):
    """By its reason: no engine has room for it, for as long as its owner waits."""


class Journey:
    """A request as its client sees it. `ended`: empty, done, or why it has no whole answer."""

    def __init__(self, world, request: Request, course: str, at: int):
        self.world, self.asked = world, request
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.ended = ""
        self.num_refusals = 0
        self.past: list[Attempt] = []  # whose bytes may still land
        self.attempt = Attempt(self, request, course, at)

    # ---- what a plan may do ----

    def go(self) -> None:
        """Take the next step of its course, if there is one."""
        for attempt in (*self.past, self.attempt):
            attempt.go()

    @property
    def is_under_way(self) -> bool:
        return any(not attempt.is_over for attempt in (*self.past, self.attempt))

    def cancel(self) -> None:
        self.end("cancelled")

    def park(self) -> None:
        if self.attempt.is_there:
            self.attempt.here.admission.park(self.attempt.key)

    def resume(self) -> None:
        if self.attempt.is_there:
            try:
                self.attempt.here.admission.resume(self.attempt.key)
            except LookupError:
                pass

    def lapse(self) -> None:
        """Let the leases of its attempt expire."""
        self.attempt.lapse()

    def move(self, course: str, at: int) -> None:
        """Continue as another attempt from what the client has."""
        if not self.ended:
            self.attempt.stop()
            self.again(course, at)

    # ---- what happens to it ----

    def end(self, how: str) -> None:
        if not self.ended:
            self.ended = how
            self.attempt.stop()

    def again(self, course: str, at: int) -> None:
        """Continue as another attempt: with one choice from its position, with several from the beginning: the tokens
        are the same."""
        if self.reasons and self.asked.sampling.n == 1:
            self.ended = "done"
            return
        if self.asked.sampling.n > 1:
            self.tokens, self.logprobs, self.reasons = {}, {}, {}
        token_ids = (*self.asked.token_ids, *self.tokens.get(0, ()))
        names = {}
        if any(self.asked.chain_parent):
            hashes = tuple(chain_hashes(CHAIN_ROOT, token_ids))
            names = {"span_hashes": hashes, "chain_parent": hashes[-1] if hashes else CHAIN_ROOT}
        key = Key(self.attempt.key.request_id, self.attempt.key.attempt + 1)
        self.past.append(self.attempt)
        self.attempt = Attempt(self, replace(self.asked, key=key, token_ids=token_ids, **names), course, at)

    def add(self, choice: int, token_ids, logprobs, reason: FinishReason | None) -> None:
        assert choice not in self.reasons, "a token after the choice has finished"
        self.tokens.setdefault(choice, []).extend(token_ids)
        self.logprobs.setdefault(choice, []).extend(entry for entry in logprobs if entry is not None)
        if reason is not None:
            self.reasons[choice] = reason


class Attempt:
    """One key: where it is, and the course it takes."""

    def __init__(self, journey: Journey, request: Request, course: str, at: int):
        self.journey, self.world, self.request, self.at = journey, journey.world, request, at
        self.here, self.there = self.world.engines[at], self.world.engines[1 - at]
        self.first: PrefillDone | None = None
        self.watermark = 0
        self.is_there = False  # `here` knows the key
        self.is_read_there = False
        self.reader_error: str | None = None
        self._leases: list[tuple[Engine, Key]] = []
        self._course: Course = getattr(self, f"_{course}")()

    @property
    def key(self) -> Key:
        return self.request.key

    @property
    def is_over(self) -> bool:
        """Return whether nothing is in flight, and no engine holds anything for it."""
        return self._course.gi_frame is None

    @property
    def is_current(self) -> bool:
        return self.journey.attempt is self and not self.journey.ended

    def go(self) -> None:
        try:
            next(self._course, None)
        except NoRoom as refused:
            if self.is_current:
                self.journey.end(f"refused: {refused}")
        except LookupError:
            # Its key has ended here, which is reported; or there, and then it is tried again.
            if self.is_current and self.key in self.here.admission.groups:
                self.stop()
                self.journey.again("whole", self.at)

    def stop(self) -> None:
        """Cancel it everywhere. What is in flight still lands: `go` on."""
        for engine in self.world.engines:
            engine.cancel(self.key)
        self.lapse()

    def lapse(self) -> None:
        for engine, key in self._leases:
            engine.admission.release_lease(key)

    def take(self, engine: Engine, output: Output) -> None:
        if not self.is_current:
            return
        match output:
            case Progress():
                assert engine is self.there and output.upto_token >= self.watermark, "a watermark that goes back"
                if output.upto_layer == engine.layout.groups[0].num_layers:
                    self.watermark = output.upto_token
            case PrefillDone():
                assert self.first is None and engine is (self.there if self.is_read_there else self.here)
                self.first = output
                for first in output.first_tokens:
                    self.journey.add(first.choice, [first.token_id], [first.logprobs], first.finish_reason)
            case TokenRun():
                made = len(self.journey.tokens.get(output.choice, ()))
                assert engine is self.here and output.first_index == made, f"index {output.first_index} behind {made}"
                self.journey.add(output.choice, output.token_ids, output.logprobs, output.finish_reason)
            case RequestEnded() if engine is self.there:
                self.reader_error = output.error
            case RequestEnded(error="failed" | "failed_together"):
                self.stop()
                self.journey.again("whole", self.at)
            case RequestEnded(error=""):
                assert len(self.journey.reasons) == self.request.sampling.n, "it ended before its choices"
                self.journey.ended = "done"
            case RequestEnded():
                self.journey.end(output.error)

    # ---- courses ----

    def _whole(self) -> Course:
        yield from self._until(lambda: self.here.submit(self.request))
        self._open(self.here)

    def _pull(self) -> Course:
        num_cached = yield from self._admit()
        yield
        yield from self._pull_cached(self.here, self.there, num_cached)
        yield from self._compute_rest()

    def _split(self, pulls_prefix: bool = False) -> Course:
        num_cached = yield from self._admit()
        yield
        accepted = yield from self._until(lambda: self.there.admission.accept(self.request, pulls_prefix))
        self.is_read_there, self.watermark = True, accepted.num_cached_tokens
        self._open(self.there)
        self._leases.append((self.there, self.key))
        try:
            yield
            if pulls_prefix:
                self.there.admission.begin_fetch(self.key)
                yield from self._pull_cached(self.there, self.here, accepted.num_cached_tokens)
                self.there.admission.compute_rest(self.key)
                yield
            is_whole = yield from self._fetch(self.here, self.there, self.key, accepted.blocks, num_cached)
            while is_whole and self.first is None and self.reader_error is None and self.is_current:
                yield
            if self.first is None:  # no token was sent: what did not come is read here
                self.is_read_there = False
                yield from self._compute_rest()
            elif is_whole:
                self.here.admission.start(self.key, going_on(self.first))
            elif self.is_current:
                self.stop()
                self.journey.again("whole", self.at)
        finally:
            self.there.admission.release_lease(self.key)

    def _prefix(self) -> Course:
        yield from self._split(pulls_prefix=True)

    def _admit(self) -> Course:
        num_cached = yield from self._until(lambda: self.here.admission.admit(self.request))
        self._open(self.here)
        return num_cached

    def _compute_rest(self) -> Course:
        yield from self._until(lambda: self.here.admission.compute_rest(self.key))

    def _open(self, engine: Engine) -> None:
        self.is_there = self.is_there or engine is self.here
        self.world.opened(engine, self.key)
        if not self.is_current:  # it came in behind its own end
            engine.cancel(self.key)

    def _pull_cached(self, taker: Engine, source: Engine, num_cached: int) -> Course:
        """Pull the source's cached prefix of the prompt behind the taker's own, under a lease of its own; as a gateway
        asks for it, with a token left to compute."""
        key = Key(f"{self.key.request_id}/offer", self.key.attempt)
        spans = self.request.span_hashes[: (len(self.request.token_ids) - 1) // SPAN_TOKENS]
        offered = source.admission.offer(key, spans)
        if not offered.blocks:
            taker.admission.fetch_settled(self.key)
            return
        self.world.opened(source, key)
        self._leases.append((source, key))
        try:
            yield
            yield from self._fetch(taker, source, key, offered.blocks, num_cached, offered.num_cached_tokens)
        finally:
            source.admission.release_lease(key)

    def _fetch(self, taker: Engine, source: Engine, key: Key, blocks, fetched: int, only: int | None = None) -> Course:
        """Fetch the KV leased as `key`, as the watermark moves, or `only` that many tokens. Return whether all has
        come."""
        self.world.counts["fetches"] += 1
        if self.world.wires:
            return (yield from self._fetch_by_wire(self.world.wires, taker, source, key, blocks, fetched, only))
        lease, size = Lease(source, taker, blocks), taker.layout.block_size
        total = len(self.request.token_ids)
        try:
            while True:
                upto = self.watermark if only is None else min(only, total)
                aim = upto if upto == total else upto // size * size
                if aim > fetched:
                    refs = yield from self._until(lambda aim=aim: taker.admission.set_aside(self.key, aim))
                    yield
                    is_right = lease.carry(refs, fetched, aim)  # it lands, whatever the key's state
                    yield
                    if not is_right:
                        return False
                    taker.admission.verify(self.key, aim)
                    fetched = aim
                if upto == total or only is not None:
                    return True
                if self.reader_error is not None or not self.is_current:
                    return False
                yield
        finally:
            taker.admission.fetch_settled(self.key)

    def _fetch_by_wire(self, wires, taker, source, key, blocks, fetched, only) -> Course:
        total = min(only or len(self.request.token_ids), len(self.request.token_ids))
        hashes = chain_hashes(CHAIN_ROOT, self.request.token_ids[:total])
        task = wires.begin(
            taker, source, self.key, key, blocks, hashes, hashes[-1] if hashes else CHAIN_ROOT, total, only or self.watermark,
            fetched,
        )  # fmt: skip
        try:
            while not task.done() and self.is_current:
                if only is None:
                    wires.advance(source, key, self.watermark)
                if self.reader_error is not None:
                    wires.cancel(source, key)
                wires.spin()
                yield
        finally:
            error = wires.settle(task)
            wires.cancel(source, key)
            taker.admission.fetch_settled(self.key)
        self.world.counts[f"fetch: {type(error).__name__}" if error else "fetched by wire"] += 1
        return error is None

    def _until(self, ask: Callable) -> Course:
        """Ask again and again, as long as there is patience."""
        while True:
            try:
                return ask()
            except Refusal as refusal:
                self.journey.num_refusals += 1
                self.world.counts["refusals"] += 1
                if refusal.reason == "too_long" or self.journey.num_refusals > MAX_REFUSALS:
                    self.stop()
                    raise NoRoom(refusal.reason) from None
                if self.is_there and not self.journey.num_refusals % REFUSALS_HOLDING:
                    self.journey.move("whole", self.at)
            yield
            if not self.is_current:
                raise LookupError(f"{self.key} was given up")
