"""Patterns of a schema: classes that have no end."""

import pytest

from baton.constraints.constraint import MAX_BYTES
from baton.constraints.json_patterns import asks_for_controls, repeats_for_good, rewrite_pattern


@pytest.mark.parametrize("unclosed", ["[)", "[^)", "[\\[", "[[]", "[\\]"])
def test_classes_without_an_end_take_time_as_the_text(unclosed):
    """Looked through from each bracket, 128 KiB of them took three minutes, in which an event loop did nothing else."""
    pattern = unclosed * (MAX_BYTES // len(unclosed))
    if "]" not in unclosed.replace("\\]", ""):
        assert rewrite_pattern(pattern) == pattern
    assert not asks_for_controls(pattern)


@pytest.mark.parametrize("pattern", [r"\.", "[.]", "(?s:.)", r"[a\].]"])
def test_what_is_no_dot_of_ecma_262_stays(pattern):
    assert "2028" not in rewrite_pattern(pattern)


@pytest.mark.parametrize("pattern", [r"\(?s.", r"\\\(?s."])
def test_a_bracket_that_is_escaped_and_may_be_missing_turns_nothing_on(pattern):
    assert "2028" in rewrite_pattern(pattern) and "2028" not in rewrite_pattern(r"\\(?s:.)")


@pytest.mark.parametrize("pattern", ["[", "[^", "[]", "[^]", "[a\\", "[a\\]", "[]a", "a["])
def test_a_class_without_an_end_stays_as_it_is(pattern):
    assert rewrite_pattern(f"[a]{pattern}") == rf"[[a]&&[^\x00]]{pattern}"


@pytest.mark.parametrize(
    ("regex", "is_possessive"),
    [(r"\x{41}+", False), (r"\u{00e9}+", False), (r"\x{41}++", True), (r"\\x{41}+", True), (r"\p{L}+", False)],
)
def test_the_code_of_a_character_is_no_repetition(regex, is_possessive):
    assert repeats_for_good(regex) == is_possessive
