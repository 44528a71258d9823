"""Constraints that explode: one clear answer within bounds, and nobody else waits."""

import errno
import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.constraints import checker
from baton.constraints.constraint import BadConstraint, Constraint
from baton.constraints.grammar import Vocabulary
from baton.service.errors import Unavailable
from gateway.text import constraint_checks
from gateway.text.constraint_checks import ConstraintChecks
from tests.support.gateway.vocabularies import byte_vocabulary
from tests.support.pace import patience

# What compiles for minutes, or takes a gigabyte, in this process.
EXPLODING = [
    Constraint("grammar", "start: A\nA: " + " & ".join(f"/(.*x.{{{n}}}.*)/" for n in range(8, 30))),
    Constraint(
        "json_schema",
        json.dumps({"allOf": [{"type": "string", "pattern": f"x.{{{n}}}y.{{{n}}}"} for n in range(8, 48)]}),
    ),
]
GOOD = Constraint("regex", "[a-z]+")


@pytest.fixture
def checks(monkeypatch):
    """Bound as they are but for the time on the wall, in which each has to have its 2 s of a core."""
    monkeypatch.setattr(constraint_checks, "_MAX_WAIT_S", patience(60))
    made = ConstraintChecks(byte_vocabulary(), 270)
    yield made
    made.close()


@pytest.mark.parametrize("constraint", EXPLODING, ids=lambda constraint: constraint.kind)
def test_what_explodes_ends_with_its_process(checks, constraint):
    place, reason = checks.check(constraint, "acme")
    assert (place, reason) == ("", "takes more than 2 s or too much memory to compile: make it simpler")
    assert checks.known(constraint, "acme") == (place, reason)
    assert checks.check(GOOD, "acme") == ("", "")


def test_what_one_tenant_has_asked_is_known_to_no_other(checks):
    """How soon an answer came told which constraints others use."""
    bad = Constraint("json_schema", '{"minimun": 1}')
    for constraint in (GOOD, bad):
        found = checks.check(constraint, "acme")
        assert (checks.known(constraint, "acme"), checks.known(constraint, "bravo")) == (found, None)


def test_others_are_checked_meanwhile(checks):
    """Each thread has a process of its own, and this one's has started: on a busy machine that takes longer than the
    other's check."""
    assert checks.check(GOOD, "acme") == ("", "")
    slow = threading.Thread(target=checks.check, args=(EXPLODING[0], "acme"))
    slow.start()
    assert checks.check(Constraint("regex", "[a-c]+"), "acme") == ("", "")
    assert slow.is_alive()
    slow.join()


def test_masks_that_take_too_long(checks):
    rules = [f"r{n}" for n in range(3000)]
    grammar = f"start: {' | '.join(rules)}\n" + "\n".join(
        f'{rule}: "k{n}" r{n * 7 % 3000} | "z"' for n, rule in enumerate(rules)
    )
    _, reason = checks.check(Constraint("grammar", grammar), "acme")
    # Which bound comes first depends on how fast the machine is: ours on a token, that on the whole, or the library's.
    assert any(bound in reason for bound in ("for one token", "make it simpler", "Current row has"))


def test_a_walk_ends_at_a_mask_that_takes_too_long(monkeypatch):
    vocabulary = checker.Vocabulary(byte_vocabulary(), 270)
    monkeypatch.setattr(checker, "MAX_MASK_S", 0.0)
    with pytest.raises(BadConstraint, match="for one token"):
        checker.walk(vocabulary.compile(GOOD))


def test_a_walk_that_is_soon_over_begins_again():
    """As the first one, `{}`, where the first name may be any of too many."""
    vocabulary = checker.Vocabulary(byte_vocabulary(), 400)
    names = {f"name{number}": {"type": "integer"} for number in range(600)}
    grammar = vocabulary.compile(Constraint("json_schema", json.dumps({"type": "object", "properties": names})))
    with pytest.raises(BadConstraint, match="Current row has"):
        checker.walk(grammar)


def test_a_walk_that_finds_no_text_says_so():
    """In a word of the library's own it did."""
    vocabulary = Vocabulary(byte_vocabulary(without="0123456789"), 270)
    with pytest.raises(BadConstraint, match="no text of this vocabulary keeps to it"):
        checker.walk(vocabulary.compile(Constraint("regex", "a[0-9]")))


def test_what_a_look_refuses_starts_no_process(checks, monkeypatch):
    monkeypatch.setattr(constraint_checks, "_Checker", lambda: pytest.fail("a process was started"))
    assert checks.check(Constraint("json_schema", '{"minimun": 1}'), "acme")[0] == "/minimun"
    assert "bytes" in checks.check(Constraint("regex", "a" * (1 << 20)), "acme")[1]


def test_a_tokenizer_that_grammars_cannot_read():
    made = ConstraintChecks(b'{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}', 1)
    try:
        assert "no grammars over this tokenizer" in made.check(GOOD, "acme")[1]
    finally:
        made.close()


def test_a_process_that_dies_is_replaced(checks):
    assert checks.check(GOOD, "acme") == ("", "")
    checks._idle[-1]._process.kill()
    checks._idle[-1]._process.wait()
    assert checks.check(Constraint("regex", "[0-9]"), "acme") == ("", "")


class Silent(constraint_checks._Checker):
    """Says nothing, as one that the kernel has ended."""

    def ask(self, frame, within_s):
        return None


def test_a_process_that_does_not_start_says_nothing_of_a_constraint(checks, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(constraint_checks, "_Checker", Silent)
        with pytest.raises(Unavailable) as raised:
            checks.check(GOOD, "acme")
    assert raised.value.retry_after_s
    assert checks.check(GOOD, "acme") == ("", "")


def test_a_process_that_cannot_be_started_says_nothing_of_a_constraint(checks, monkeypatch):
    def no_process(*arguments, **options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(constraint_checks.subprocess, "Popen", no_process)
        with pytest.raises(Unavailable, match="Cannot allocate memory"):
            checks.check(GOOD, "acme")
    assert checks.check(GOOD, "acme") == ("", "")


def test_one_that_has_too_little_time_says_nothing_of_a_constraint(checks, monkeypatch):
    """It may have had no processor: its own bound is of processor time."""
    slow = Constraint("regex", "[0-9]+")
    assert checks.check(GOOD, "acme") == ("", "")
    checks._idle[-1]._process.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(constraint_checks, "_MAX_WAIT_S", 0.0)
        with pytest.raises(Unavailable):
            checks.check(slow, "acme")
    assert checks.check(slow, "acme") == ("", "")


def test_a_walk_follows_the_grammar_to_its_end():
    vocabulary = checker.Vocabulary(byte_vocabulary(), 270)
    checker.walk(vocabulary.compile(Constraint("choice", '["yes"]')))


def test_any_thread_asks_the_process_that_is_there(checks, monkeypatch):
    checks.start()
    monkeypatch.setattr(constraint_checks, "_Checker", lambda: pytest.fail("a process was started"))
    with ThreadPoolExecutor(1) as other:
        assert other.submit(checks.check, GOOD, "acme").result() == ("", "")
