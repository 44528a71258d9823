"""Grammars in GBNF: what they let an answer be, character by character, and what is wrong with them."""

import itertools
import random
from functools import partial

import pytest
from tokenizers import Tokenizer

from baton.constraints.constraint import MAX_BYTES, BadConstraint, Constraint
from baton.constraints.gbnf import in_lark
from baton.constraints.grammar import Vocabulary
from tests.support.gateway.vocabularies import byte_vocabulary

TOKENIZER = Tokenizer.from_buffer(byte_vocabulary())
VOCABULARY = Vocabulary(byte_vocabulary(), TOKENIZER.get_vocab_size())
# llama.cpp's own examples.
ARITHMETIC = r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
# Grammar, texts that keep to it, texts that do not.
CASES = {
    "arithmetic": (ARITHMETIC, ["1=2\n", "a +(2*x)= 2 \n1=2\n"], ["1=2", "1 + 2=3\n", "=\n"]),
    "json": (JSON, ['{"a": [1, -2.5e3, {"ü\\n": null}], "b": "x" }', "{}"], ["[1]", '{"a": }', '{"a": 01}', '{"a\n": 1}']),
    "no longest lexeme": ('root ::= a b root?\na ::= [0-9]+\nb ::= [0-9] "x"', ["12x", "12x345x"], ["1x", "12"]),
    "a word of its own letters": ('root ::= [a-z]+ "ing" (" " root)?', ["singing", "ringing king"], ["inks", "ing"]),
    "escapes": (r'root ::= "\x41\u00e9\U0001F600\n\"" [\u00e9-\u00ff\]\\^-]', ['Aé😀\n"ÿ', 'Aé😀\n"]', 'Aé😀\n"-'], ['Aé😀\n"e']),
    "control characters": ('root ::= "\x7f\\x00\\x9f" [\\x00-\\x1f]', ["\x7f\x00\x9f\x1f"], ["\x7f\x00\x9f "]),
    "any": ("root ::= . [^a] [^]", ["\n\nx", "a🙂a"], ["aaa", "ab"]),
    "no sets of a regex": ("root ::= [a&&b] [!--~~] [/.]", ["&-/", "b~.", "a!."], ["c!.", "a}."]),
    "times": ('root ::= "ab"{2} "c"{ 1, 2 } [d]{1,} ( | "e")', ["ababcd", "ababccdde"], ["abcd", "ababd", "ababcccd"]),
    "nothing": ('root ::= "" | "a"', ["", "a"], ["b"]),
    "names": ('root ::= a-b A_B aB\na-b ::= "x"\nA_B ::= "y"\naB ::= "z"\nunused ::= unused', ["xyz"], ["xxx", "yyy"]),
    "recursive names": ('root ::= a-b | a_b\na-b ::= "x" root\na_b ::= "y"', ["xxy", "y"], ["x"]),
    "a line each": ('root ::=\n  "a"  # one\n  | "b"\n\n# two\n', ["a", "b"], ["ab"]),
    "brackets in texts": ("root ::= " + '"([" [[(] ' * 40, ["([[" * 40], ["([" * 40]),
    "a rule begins with start": ('root ::= start\nstart ::= "a" start | "b"', ["aab"], ["aa"]),
}  # fmt: skip


def keeps(lark: str, text: str) -> bool:
    """Return whether a text is an answer that the grammar lets end."""
    cursor, mask = VOCABULARY.compile(Constraint("grammar", lark)).cursor(), VOCABULARY.new_masks(1)[0]
    token_ids = TOKENIZER.encode(text).ids
    if cursor.num_valid(token_ids) < len(token_ids):
        return False
    cursor.read(token_ids)
    return cursor.is_over or (cursor.fill(mask) and cursor.may_end)


@pytest.mark.parametrize("name", CASES)
def test_texts_keep_to_it_character_by_character(name):
    grammar, good, bad = CASES[name]
    lark = in_lark(grammar)
    assert [text for text in good if not keeps(lark, text)] == []
    assert [text for text in bad if keeps(lark, text)] == []


def test_what_is_in_lark_stays_as_it_is():
    for grammar in ('start: "::=" a\na: "root ::= x"', "nothing", "", '// root ::= "a"\nstart: "b"'):
        assert in_lark(grammar) == grammar


BAD = {
    'root ::= "a': "line 1: is not GBNF: '\"a'",
    'root ::= "a"\n\nb ::= [a': "line 3: is not GBNF: '[a'",
    "root ::= <[12]>": "line 1: is not GBNF",
    'root ::= (\n("a"': "line 2: a bracket is not closed",
    'root ::= "a")': "line 1: a bracket is closed that was not opened",
    'root ::= "a" (* "b")': "line 1: there is nothing that * repeats",
    'root ::= "a"*+': "line 1: there is nothing that + repeats",
    'root ::= "a" | {2}': "line 1: there is nothing that {2} repeats",
    'root ::= "a"\n "b"{0}': "line 2: what {0} repeats is never there: leave it out",
    'root ::= "a"\n b': "line 2: there is no rule b",
    'a ::= "a"': "has no rule root",
    'root ::= "a"\nroot ::= "b"': "line 2: there is a rule root already",
    '"a"\nroot ::= "b"': "line 1: a rule is needed first",
    "root ::= [z-a]": "line 1: the range from 'z' to 'a' is empty",
    "root ::= []": "line 1: there is no character in []",
    r'root ::= "\q"': r"line 1: there is no escape '\\q'",
    r'root ::= "\ud800"': r"line 1: \ud800 is no character",
    r"root ::= [\U00110000]": r"line 1: \U00110000 is no character",
    "root ::= " + "a" * MAX_BYTES: f"has {MAX_BYTES + 9} bytes, at most",
    'root ::= root "' + "a" * (MAX_BYTES - 20) + '"': "bytes in Lark, at most",
}  # fmt: skip


@pytest.mark.parametrize("grammar", BAD, ids=lambda grammar: grammar[:20])
def test_what_is_wrong_has_its_line(grammar):
    with pytest.raises(BadConstraint) as caught:
        in_lark(grammar)
    message = str(caught.value)
    assert BAD[grammar] in message and "\n" not in message and len(message) < 200


@pytest.mark.parametrize("bounds", ["{1,", "{1", "{", "{1,1"])
def test_blanks_between_bounds_take_time_as_they_are_many(bounds):
    """Tried in all ways in which two runs of blanks divide them, 6,000 took 1.7 s, and 128 KiB would take ten minutes
    of the GIL."""
    with pytest.raises(BadConstraint, match="is not GBNF"):
        in_lark(f'root ::= "a"{bounds}' + " " * (MAX_BYTES - 100) + "x")


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= root "a"', "root ::= root", 'root ::= "a"{0}', 'root ::= "a"{3,2}', "root ::= [a]{99999999999}",
        f"root ::= {'(' * 65}{')' * 65}",
    ],
)  # fmt: skip
def test_what_no_answer_could_keep_to_is_refused_as_in_lark(grammar):
    with pytest.raises(BadConstraint):
        VOCABULARY.compile(Constraint("grammar", in_lark(grammar)))


class RandomGrammar:
    """A grammar in GBNF, of the letters a and b, that says itself which texts keep to it."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self.names = ["root", "r-1", "r_2"]
        self.rules = {name: self._node(3) for name in self.names}

    def __str__(self) -> str:
        return "\n".join(f"{name} ::= {written(node)}" for name, node in self.rules.items())

    def _node(self, depth: int):
        kind = self._random.choice(["text", "set", "name"] + ["alternatives", "sequence", "times"] * bool(depth))
        if kind in ("alternatives", "sequence"):
            return kind, [self._node(depth - 1) for _ in range(self._random.randint(2, 3))]
        if kind == "times":
            return kind, (self._node(depth - 1), *self._random.choice([(0, 1), (0, None), (1, None), (1, 2), (2, 2)]))
        return kind, self._random.choice(
            {"text": ["", "a", "b", "ab", "ba"], "set": ["ab", "b"], "name": self.names}[kind]
        )

    def keeps(self, text: str) -> bool:
        ends: dict[tuple[str, int], set[int]] = {
            (name, at): set() for name in self.rules for at in range(len(text) + 1)
        }
        while True:
            found = {(name, at): self._ends(self.rules[name], text, at, ends) for name, at in ends}
            if found == ends:
                return len(text) in ends["root", 0]
            ends = found

    def _ends(self, node, text: str, at: int, ends) -> set[int]:
        kind, value = node
        if kind == "text":
            return {at + len(value)} if text.startswith(value, at) else set()
        if kind == "set":
            return {at + 1} if at < len(text) and text[at] in value else set()
        if kind == "name":
            return ends[value, at]
        if kind == "alternatives":
            return set().union(*(self._ends(each, text, at, ends) for each in value))
        if kind == "times":
            (each, least, most), reached = value, {at}
            found = set(reached) if least == 0 else set()
            for count in range(1, (most or len(text) + least + 1) + 1):
                reached = set().union(*(self._ends(each, text, place, ends) for place in reached))
                found |= reached if count >= least else set()
            return found
        reached = {at}
        for each in value:
            reached = set().union(*(self._ends(each, text, place, ends) for place in reached))
        return reached


def written(node) -> str:
    kind, value = node
    if kind == "text":
        return f'"{value}"'
    if kind == "set":
        return f"[{value}]"
    if kind == "alternatives":
        return f"({' | '.join(map(written, value))})"
    if kind == "sequence":
        return f"({' '.join(map(written, value))})"
    if kind == "times":
        each, least, most = value
        return f"({written(each)}){{{least},{'' if most is None else most}}}"
    return value


@pytest.mark.parametrize("seed", range(40))
def test_random_grammars_keep_what_they_say(seed):
    grammar = RandomGrammar(seed)
    texts = ["".join(each) for length in range(5) for each in itertools.product("ab", repeat=length)]
    wanted = [text for text in texts if grammar.keeps(text)]
    keeping = partial(keeps, in_lark(str(grammar)))
    try:
        assert [text for text in texts if keeping(text)] == wanted, str(grammar)
    except BadConstraint:
        assert not any(wanted), str(grammar)
