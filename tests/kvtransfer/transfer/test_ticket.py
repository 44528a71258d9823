import asyncio
from types import SimpleNamespace

import pytest

from baton.v1 import kv_pb2
from kvtransfer.errors import ProtocolError, TicketRefused
from kvtransfer.transfer import source_dialogue
from kvtransfer.transfer.source_dialogue import SourceDialogue
from kvtransfer.transfer.ticket import TicketMint, parse_ticket

LEASE, TAKER, EPOCH = b"l" * 16, b"decode-0", 2**63 + 5
MINT = TicketMint()


def ticket(**changes) -> kv_pb2.Ticket:
    minted = parse_ticket(MINT.mint(LEASE, TAKER, EPOCH))
    for field, value in changes.items():
        setattr(minted, field, value)
    return minted


def test_opens_its_own_lease_again_and_again():
    for _ in range(2):
        MINT.check(ticket(), TAKER, EPOCH)


@pytest.mark.parametrize(
    "changes", (dict(mac=b""), dict(mac=b"\0" * 32), dict(lease_id=b"m" * 16), dict(taker_instance=b"decode-1"),
                dict(taker_epoch=1), dict(fetch_id=b"other")),
    ids=str,
)  # fmt: skip
def test_any_change_is_forgery(changes):
    with pytest.raises(TicketRefused):
        MINT.check(ticket(**changes), TAKER, EPOCH)


@pytest.mark.parametrize("asked", ((b"decode-1", EPOCH), (TAKER, EPOCH + 1)))
def test_serves_nobody_else(asked):
    with pytest.raises(TicketRefused):
        MINT.check(ticket(), *asked)


def test_dies_with_the_process():
    with pytest.raises(TicketRefused, match="not minted by this process"):
        TicketMint().check(ticket(), TAKER, EPOCH)


def test_fields_cannot_be_shifted_into_each_other():
    minted = ticket()
    minted.lease_id, minted.taker_instance = LEASE + TAKER[:1], TAKER[1:]
    with pytest.raises(TicketRefused):
        MINT.check(minted, TAKER[1:], EPOCH)


def test_no_ticket_at_all():
    with pytest.raises(ProtocolError):
        parse_ticket(b"\xff" * 9)


async def test_a_taker_that_is_heard_keeps_its_line_however_many_show_its_ticket(monkeypatch):
    """The second of them comes when the taker was heard, and before the first of them has seen that."""
    monkeypatch.setattr(source_dialogue, "TAKEOVER_S", 60)
    closed = []
    connection = SimpleNamespace(close=lambda: closed.append("the taker's"))
    context = SimpleNamespace(dialogues={})
    taker, first, second = (SourceDialogue(context, connection, "tcp", lambda: None) for _ in range(3))
    context.dialogues[b"fetch", 0] = taker
    showing = [asyncio.create_task(first._take_over(taker))]
    await asyncio.sleep(0.02)
    taker._heard.set()
    showing.append(asyncio.create_task(second._take_over(taker)))
    await asyncio.sleep(0.02)
    taker._heard.set()
    outcomes = await asyncio.gather(*showing, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [TicketRefused] * 2 and not closed
