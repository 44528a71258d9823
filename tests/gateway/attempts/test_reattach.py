"""A sequence that is looked for on workers, without a gateway around it."""

import pytest

from baton.service.clock import now
from baton.v1 import worker_pb2 as pb
from gateway.attempts.reattach import Reattach
from gateway.link.mailbox import Mailbox
from gateway.link.worker_link import WorkerLink


@pytest.fixture
def link() -> WorkerLink:
    return WorkerLink(
        "127.0.0.1:1", b"i" * 16, on_hello=lambda link, hello: None, on_change=lambda link: None,
        on_block_events=lambda link, events: None, max_unread_tokens=50,
    )  # fmt: skip


def test_tokens_that_come_again_at_once_do_not_count_as_unread(link):
    Reattach("key", Mailbox(), pb.Attach(next_index=[0]), now() + 60).ask([link], num_received=300)
    (leg,) = link.legs.values()
    leg.post_tokens(0, 0, list(range(300)), [], 0)
    leg.post_tokens(0, 300, list(range(50)), [], 0)  # that were written since
    assert leg in link.legs.values()
    leg.post_tokens(0, 350, list(range(51)), [], 0)
    assert not link.legs


def test_tokens_that_were_written_while_the_session_was_gone_do_not_count_as_unread(link):
    """They come at once, those of all choices; the client has read all that came before."""
    Reattach("key", Mailbox(), pb.Attach(next_index=[0] * 8), now() + 60).wait_for(link, link.worker_id)
    (leg,) = link.legs.values()
    for choice in range(8):
        leg.post_tokens(choice, 0, list(range(12)), [], 0)
    assert leg in link.legs.values()
    leg.post_tokens(0, 12, list(range(5)), [], 0)
    assert not link.legs
