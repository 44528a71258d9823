import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gateway.queue.queue_wait
import gateway.queue.waiting_queue
from baton.protocol import KV_FULL
from baton.service.errors import Overloaded
from baton.service.slo import Slo
from baton.v1 import worker_pb2 as pb
from gateway.queue.queue_wait import QueueWait
from gateway.queue.waiting_queue import QueuedRequest, WaitingBounds, WaitingQueue, WaitingQueues, rank
from gateway.routing.routing import Decision

INTERACTIVE, STANDARD, BATCH = Slo(0.3, 0.05), Slo(1.0, 0.1), Slo()


@pytest.fixture
def clock(monkeypatch):
    """`clock[0]` is the time."""
    at = [1000.0]
    monkeypatch.setattr(gateway.queue.waiting_queue, "now", lambda: at[0])
    return at


def queued(
    received: float = 0.0, slo: Slo = BATCH, priority: int = 0, num_tokens: int = 100, **fields
) -> QueuedRequest:
    return QueuedRequest(rank(received, slo, priority), num_tokens, slo, **fields)


def line(max_waiting: int, max_tokens: int = 1 << 30) -> WaitingQueue:
    """One whose bounds are its own."""
    return WaitingQueue(WaitingBounds(max_waiting, max_tokens), "decode queue")


def test_a_line_calls_its_first_only():
    called, queue = [], line(3)
    low, high = (
        queue.join(queued(), lambda: called.append("low")),
        queue.join(queued(priority=5), lambda: called.append("high")),
    )
    late = queue.join(queued(priority=5), lambda: called.append("late"))
    with pytest.raises(Overloaded, match="3 requests wait already"):
        queue.join(queued(priority=9), lambda: None)
    queue.call_first()
    assert called == ["high"] and queue.is_first(high)
    queue.leave(late)
    queue.leave(high)
    assert called == ["high", "high", "low"]
    queue.leave(low)
    queue.call_first()
    assert not queue and len(called) == 3


def test_who_leaves_is_forgotten_though_one_before_it_waits():
    """A request that was cancelled in line stayed in memory with its prompt, however many came and went."""

    class Request:
        def call(self) -> None: ...

    queue, requests = line(3), [Request() for _ in range(3)]
    entries = [queue.join(queued(), request.call) for request in requests]
    queue.leave(entries.pop(1), served=False)
    left = weakref.ref(requests.pop(1))
    assert left() is None
    assert len(queue) == 2 and queue.is_first(entries[0])
    queue.leave(entries[0])
    assert queue.is_first(entries[1])


def test_a_change_of_line_keeps_the_time(monkeypatch):
    """Also where the other line is full; each second is counted in the line in which it was waited."""
    at, lines = [1000.0], WaitingQueues(2)
    monkeypatch.setattr(gateway.queue.queue_wait, "now", lambda: at[0])
    wait = QueueWait(queued(), lambda: None, 10.0)
    lines.credit.refused_for = KV_FULL
    lines.credit.join(queued(), lambda: None)
    wait.join_for_worker(lines.decode_start)
    at[0] += 6.0
    wait.join(lines.credit)
    assert not lines.decode_start and len(lines.credit) == len(lines) == 2
    at[0] += 3.0
    assert not wait.is_over
    at[0] += 1.0
    assert wait.is_over
    wait.leave(served=True)
    assert wait.waited_s == {"decode queue": 6.0, "kv pool": 4.0} and len(lines.credit) == 1


@pytest.mark.parametrize("hint_ms, waits_s", [(0, 0.02), (200, 0.2), (60_000, 0.5)])
def test_a_worker_s_hint_is_kept_within_bounds(monkeypatch, hint_ms, waits_s):
    monkeypatch.setattr(gateway.queue.queue_wait, "now", lambda: 1000.0)
    wait = QueueWait(queued(), lambda: None, 10.0)
    wait.note_refusal(pb.Refused(retry_after_ms=hint_ms))
    wait.join(line(3))
    assert wait.wake_at == pytest.approx(1000 + waits_s)


def test_all_lines_have_one_bound():
    """Each had it for itself: four times as many waited."""
    lines = WaitingQueues(3, max_tokens=1000)
    for line_ in (lines.credit, lines.prefill, lines.decode_start):
        line_.join(of("flood"), lambda: None)
    for line_ in (lines.credit, lines.prefill_start):
        with pytest.raises(Overloaded, match="3 requests wait already, 3 of them of this tenant"):
            line_.join(of("flood"), lambda: None)
    quiet = lines.prefill_start.join(of("quiet", num_tokens=5000), lambda: None)  # it has its part
    with pytest.raises(Overloaded, match="4 requests wait already, 1 of them of this tenant"):
        lines.credit.join(of("quiet"), lambda: None)
    lines.prefill_start.leave(quiet)
    lines = WaitingQueues(10, max_tokens=1000)
    lines.credit.join(of("flood", num_tokens=900), lambda: None)
    with pytest.raises(Overloaded, match="900 tokens wait already, at most 1000 may"):
        lines.prefill.join(of("flood", num_tokens=200), lambda: None)


@pytest.mark.parametrize("before", ["waited", "ran"])
def test_one_that_has_waited_or_run_is_not_refused_for_the_number_that_wait(before):
    """It has credit, say, and waits for the prompt to be read; or its worker was lost."""
    lines = WaitingQueues(1)
    wait = QueueWait(queued(), lambda: None, 10.0)
    if before == "waited":
        wait.join(lines.credit)
        wait.leave(served=True)
    else:
        wait.note_running()
    lines.credit.join(queued(), lambda: None)
    wait.join(lines.prefill)
    assert len(lines) == 2
    with pytest.raises(Overloaded):
        QueueWait(queued(), lambda: None, 10.0).join(lines.prefill)


def test_what_a_line_waits_for():
    lines = WaitingQueues(3)
    wait = QueueWait(queued(), lambda: None, 10.0)
    for line, reason in ((lines.credit, KV_FULL), (lines.prefill, "queue_full"), (lines.credit, "queue_full")):
        line.refused_for = reason
        wait.join(line)
        wait.join(line)  # refused again
        wait.leave(served=True)
    assert [*wait.waited_s] == ["kv pool", "prefill queue", "decode queue"] and min(wait.waited_s.values()) > 0


def test_a_line_is_bounded_in_tokens():
    queue = line(100, max_tokens=1000)
    whole = queue.join(queued(num_tokens=5000), lambda: None)  # alone it may be as long as it is
    with pytest.raises(Overloaded, match="5000 tokens wait already, at most 1000 may") as caught:
        queue.join(queued(num_tokens=1), lambda: None)
    assert caught.value.reason == "QUEUE_TOKENS" and caught.value.retry_after_s > 0
    queue.leave(whole)
    queue.join(queued(num_tokens=600), lambda: None)
    last = queue.join(queued(num_tokens=400), lambda: None)
    with pytest.raises(Overloaded, match="1000 tokens wait already"):
        queue.join(queued(num_tokens=1), lambda: None)
    queue.leave(last)
    queue.join(queued(num_tokens=1), lambda: None)


# ---- tenants in a queue ----


def of(
    tenant: str, received: float = 0.0, num_tokens: int = 100, num_expected: float = 0.0, priority: int = 0
) -> QueuedRequest:
    return QueuedRequest(rank(received, BATCH, priority), num_tokens, tenant=tenant, num_expected=num_expected)


def serve(queue: WaitingQueue, entries: list) -> str:
    """Serve the first until none waits, and return their tenants, in order."""
    order = []
    while queue:
        entry = next(entry for entry in entries if entry.is_open and queue.is_first(entry))
        order.append(entry.queued.tenant[0])
        queue.leave(entry)
    return "".join(order)


def test_tenants_take_turns():
    """The order does not depend on how much a tenant has waiting, or on its priorities."""
    queue = line(1000)
    entries = [queue.join(of("flood", num_tokens=600, priority=10), lambda: None) for _ in range(20)]
    entries += [queue.join(of("quiet", received=5.0, num_tokens=600), lambda: None) for _ in range(3)]
    assert serve(queue, entries)[:7].count("q") == 3
    assert not queue


def test_turns_are_by_tokens_read_and_written():
    queue = line(1000)
    entries = [queue.join(of("flood", num_tokens=100, num_expected=1900), lambda: None) for _ in range(40)]
    entries += [queue.join(of("quiet", num_tokens=400, num_expected=100), lambda: None) for _ in range(80)]
    order = serve(queue, entries)
    assert order[:50].count("f") in (9, 10, 11)


def test_of_one_tenant_the_earliest_deadline_is_first():
    queue = line(10)
    entries = [queue.join(of("a", received, num_tokens=1), lambda: None) for received in (3.0, 1.0, 2.0)]
    order = []
    while queue:
        entry = next(entry for entry in entries if entry.is_open and queue.is_first(entry))
        order.append(entries.index(entry))
        queue.leave(entry)
    assert order == [1, 2, 0]


def test_a_flood_fills_nobody_elses_line():
    queue = line(8, max_tokens=1000)
    for _ in range(8):
        queue.join(of("flood"), lambda: None)
    with pytest.raises(Overloaded) as caught:
        queue.join(of("flood"), lambda: None)
    assert caught.value.reason == "QUEUE_FULL"
    for _ in range(4):
        queue.join(of("quiet"), lambda: None)
    with pytest.raises(Overloaded):
        queue.join(of("quiet"), lambda: None)
    queue.join(of("third", num_tokens=5000), lambda: None)
    with pytest.raises(Overloaded) as caught:
        queue.join(of("third", num_tokens=1), lambda: None)
    assert caught.value.reason == "QUEUE_TOKENS"


def test_who_is_refused_lets_the_next_tenant_try():
    called, queue = [], line(10)
    entries = {
        name: queue.join(of(name), lambda name=name: called.append(name)) for name in ("flood", "quiet", "third")
    }
    queue.join(of("flood", received=9.0), lambda: called.append("never: it is not the first of its tenant"))
    queue.call_first()
    for _ in range(3):
        queue.call_next_tenant(entries[called[-1]])
    assert sorted(called) == ["flood", "quiet", "third"], "each once: then all wait until something changes"
    first = next(entry for entry in entries.values() if queue.is_first(entry))
    queue.call_next_tenant(first)  # it has asked once more by itself
    assert len(called) == 4 and called[-1] != first.queued.tenant


def test_turns_are_by_tokens_whatever_was_refused_between():
    called, queue, got = [], line(100), dict.fromkeys(("large", "small"), 0)
    costs = {"large": 1000, "small": 100}

    def join(name):
        entries[name] = queue.join(of(name, num_tokens=costs[name]), lambda: called.append(name))

    entries = {}
    for name in costs:
        join(name)
    for _ in range(500):
        called.clear()
        queue.call_first()
        for name in called:  # workers are full: one after the other
            queue.call_next_tenant(entries[name])
        queue.call_first()
        entry, name = entries[called[-1]], called[-1]  # there is room
        got[name] += costs[name]
        join(name)
        queue.leave(entry)
    assert abs(got["large"] - got["small"]) <= 2 * 64 + 2 * 1000


def test_the_wait_of_a_tenant_is_its_own(clock):
    queue = line(100)
    entries = [queue.join(of("flood", clock[0], num_tokens=500), lambda: None) for _ in range(20)]
    for entry in entries[:4]:
        clock[0] += 0.5
        queue.leave(entry)
    assert queue.wait_s(of("flood", clock[0], 500)) == pytest.approx(16 * 0.5)
    assert queue.wait_s(of("quiet", clock[0], 500)) == 0.0  # it asks at once
    queue.join(of("quiet", clock[0], num_tokens=500), lambda: None)
    assert queue.wait_s(of("quiet", clock[0], 500)) == pytest.approx(1.5)


# ---- deadlines ----


def test_earlier_deadlines_first():
    order = [queued(0.0, BATCH), queued(0.5, STANDARD), queued(0.9, INTERACTIVE), queued(0.5, BATCH, priority=9)]
    assert [order.index(each) for each in sorted(order, key=lambda each: each.rank)] == [2, 1, 3, 0]


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.sampled_from([INTERACTIVE, STANDARD, BATCH]), st.integers(-(2**31), 2**31 - 1)),
        max_size=60,
    )
)
def test_nobody_starves(later):
    """However many come with whatever priority, the lowest batch request is overtaken only by those who come within
    half a minute of it."""
    waiting, at = queued(0.0, BATCH, priority=-(2**31)), 0.0
    for pause_s, slo, priority in later:
        at += pause_s
        if queued(at, slo, priority).rank < waiting.rank:
            assert at < 30


def test_the_wait_is_as_long_as_the_line_has_been_slow(clock):
    queue = line(100)
    entries = [queue.join(queued(clock[0], num_tokens=500), lambda: None) for _ in range(10)]
    assert queue.wait_s(queued(clock[0])) == 0.0  # none has been served yet
    for entry in entries[:4]:
        clock[0] += 0.5
        queue.leave(entry)
    assert queue.wait_s(queued(clock[0])) == pytest.approx(6 * 0.5)
    assert queue.wait_s(queued(clock[0], INTERACTIVE)) == 0.0  # it would go first
    queue.leave(entries[4], served=False)
    assert queue.wait_s(queued(clock[0])) == pytest.approx(5 * 0.5)
    clock[0] += 10
    assert queue.wait_s(queued(clock[0])) > 5  # it does not move


def test_who_would_be_served_too_late_is_told_at_once(clock):
    queues = WaitingQueues(100)
    entries = [queues.prefill.join(queued(clock[0], num_tokens=500), lambda: None) for _ in range(8)]
    for entry in entries[:4]:
        clock[0] += 0.25
        queues.prefill.leave(entry)
    queues.check(queued(clock[0], BATCH), 0.1)  # 1 s in queue, and no hurry
    late = QueuedRequest(queued(clock[0]).rank, 100, STANDARD)
    with pytest.raises(Overloaded, match="1.0 s of that in the queue") as caught:
        queues.check(late, 0.1)
    assert caught.value.reason == "TTFT_BUDGET" and 0.5 <= caught.value.retry_after_s <= 10
    queues.check(late, 2.0)  # alone it takes twice what the class allows: it may wait as long
    with pytest.raises(Overloaded):
        queues.check(queued(clock[0], BATCH, max_wait_s=1.0), 0.1)


def test_a_way_that_breaks_a_promise_is_refused():
    way = Decision("p", "d", "", ttft_s=0.9, idle_ttft_s=0.1, tpot_s=0.06, idle_tpot_s=0.02)
    queued(slo=BATCH).check(way, 1.0)
    queued(slo=Slo(2.0, 0.1)).check(way, 0.0)
    with pytest.raises(Overloaded):
        queued(slo=Slo(2.0, 0.1)).check(way, 1.0)
    for slo, reason in ((STANDARD, "TTFT_BUDGET"), (Slo(None, 0.05), "TPOT_BUDGET")):
        with pytest.raises(Overloaded) as caught:
            queued(slo=slo).check(way, 0.0)
        assert caught.value.reason == reason


def test_an_idle_system_refuses_nobody():
    """However slow it is, and whatever was promised."""
    slow = Decision("p", "d", "", ttft_s=30.0, idle_ttft_s=30.0, tpot_s=1.0, idle_tpot_s=1.0)
    queued(slo=INTERACTIVE).check(slow, 0.0)
    WaitingQueues(1).check(queued(slo=INTERACTIVE), 30.0)
