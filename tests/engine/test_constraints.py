"""Answers under constraints: they keep to them, and are the same bits split or whole, speculated or not, preempted,
parked and migrated."""

import itertools
import json
import random
import re
import threading
from dataclasses import replace
from functools import partial

import jsonschema
import pytest
from tokenizers import Tokenizer

from baton.constraints import grammar
from baton.constraints.constraint import Constraint
from baton.engine import native
from baton.engine.core.request import FinishReason, FirstToken, Key, Refusal, Request
from baton.engine.execute import multi_step
from baton.engine.sampling import grammars, step_masks
from baton.engine.schedule.states import GroupState
from baton.engine.speculation.control import controller
from baton.sampling_params import SamplingParams
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.handover import check_handed_over, hand_over
from tests.support.engine.serving import check_empty, check_same, num_accepted, serve, serve_parking
from tests.support.engine.toy_engine import engine_request
from tests.support.gateway.vocabularies import END, byte_vocabulary
from tests.support.model_folders.draft_models import DRAFT_VOCAB, load_draftable, make_target_and_draft, mixed_requests
from tests.support.model_folders.families import make_adapter, make_folder
from tests.support.pace import patience

TOKENIZER_JSON = byte_vocabulary(only='{}[]":,0123456789.-+abcdefghijlnorstuxyE \n', words=("true", "false", "null"))
TOKENIZER = Tokenizer.from_buffer(TOKENIZER_JSON)
END_ID = TOKENIZER.token_to_id(END)
SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["xy", "z"]}}, "required": ["a", "b"],
     "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "object", "properties": {"n": {"type": "string", "maxLength": 6}}, "required": ["n"]},
)  # fmt: skip
REGEX, CHOICES = "[a-c]+(-[0-9]{2,5})*", ["true", "false", "[1, 2]"]
CONSTRAINTS = (
    *(Constraint("json_schema", json.dumps(schema)) for schema in SCHEMAS),
    Constraint("json_object", ""),
    Constraint("regex", REGEX),
    Constraint("choice", json.dumps(CHOICES)),
    Constraint("grammar", 'start: item ("," item)*\nitem: NAME ":" NUMBER\nNAME: /[a-f]{1,4}/\nNUMBER: /[0-9]+/'),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = make_target_and_draft(tmp_path_factory.mktemp("constraints"))
    assert TOKENIZER.get_vocab_size() <= DRAFT_VOCAB
    for folder in made:
        (folder / "tokenizer.json").write_bytes(TOKENIZER_JSON)
    return made


@pytest.fixture
def gated(folders, monkeypatch):
    """(an engine, the gate before its grammars, the constraints that were compiled)."""
    engine, gate, compiled = load_draftable(folders[0]), threading.Event(), []
    compile = engine.grammars.vocabulary.compile

    def compile_behind(constraint):
        compiled.append(constraint)
        assert gate.wait(patience(30))
        return compile(constraint)

    monkeypatch.setattr(engine.grammars.vocabulary, "compile", compile_behind)
    yield engine, gate, compiled
    gate.set()


def constrained(count: int, max_tokens: int = 50, seed: int = 0, free: bool = True) -> list[Request]:
    """Requests of every kind of constraint and sampling, some of them free."""
    kinds = [*CONSTRAINTS, None] if free else CONSTRAINTS
    return [
        replace(
            request, constraint=kinds[index % len(kinds)], stop_token_ids=frozenset([END_ID]), max_tokens=max_tokens
        )
        for index, request in enumerate(mixed_requests(count, seed=seed))
    ]


def keeps(constraint: Constraint, text: str) -> bool:
    """Return whether a whole answer is one."""
    kind = constraint.kind
    if kind == "regex":
        return re.fullmatch(REGEX, text) is not None
    if kind == "choice":
        return text in CHOICES
    if kind == "grammar":
        return re.fullmatch("[a-f]{1,4}:[0-9]+(,[a-f]{1,4}:[0-9]+)*", text) is not None
    schema = json.loads(constraint.text or '{"type": "object"}')
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def check_kept(requests, records) -> int:
    """Every answer that ended by itself keeps to its constraint; how many these are."""
    num_finished = 0
    for request in requests:
        assert not records[request.key].ended.error, records[request.key].ended
        for tokens, reason in records[request.key].answer().values():
            if request.constraint is not None and reason is FinishReason.STOP:
                assert END_ID not in tokens[:-1]
                assert keeps(request.constraint, TOKENIZER.decode(tokens)), TOKENIZER.decode(tokens)
                num_finished += 1
    return num_finished


@pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable())
@pytest.mark.parametrize("speculator", [dict(), dict(speculator="ngram", num_draft_tokens=4)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_several_steps_in_a_call_are_those_by_themselves(folders, monkeypatch, dtype, speculator):
    """The mask behind each token is found within the call, which ends where a grammar does."""
    monkeypatch.setattr(multi_step, "BUDGET_NS", 10**15)
    monkeypatch.setattr(controller, "FIRST_PLAIN_INTERVAL", controller.NEVER)
    several, single = (load_draftable(folders[0], dtype=dtype, **speculator) for _ in range(2))
    single._multi_step, calls, by_call = None, several._multi_step._run, []
    monkeypatch.setattr(several._multi_step, "_run", lambda *each: by_call.append(calls(*each)) or by_call[-1])
    requests = [
        replace(each, min_tokens=index % 3 * 4, sampling=replace(each.sampling, logprobs=index % 2 or None))
        for index, each in enumerate(constrained(48))
    ]
    (found, _), (expected, _) = (serve(engine, requests) for engine in (several, single))
    by_call.clear()
    for request in requests[: len(CONSTRAINTS)]:
        request = replace(request, key=Key(f"{request.key.request_id} alone"))
        run_to_end(several, [request], found)
        run_to_end(single, [request], expected)
    check_same(found, expected, expected)
    assert check_kept(requests, found) > 20 and max(by_call) == (1 if speculator else multi_step.MAX_STEPS)
    assert num_accepted(several) == num_accepted(single) and bool(num_accepted(several)) == bool(speculator)


@pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable())
def test_others_keep_their_rows_where_a_mask_cuts_proposals(tmp_path, monkeypatch):
    """Nothing may follow the last proposal, and no stop token ends the answer; the rows behind it are of adapters and
    of none."""
    monkeypatch.setattr(controller, "FIRST_PLAIN_INTERVAL", controller.NEVER)
    model = make_folder(tmp_path / "base", "llama3", hidden_size=64)
    (tmp_path / "base" / "tokenizer.json").write_bytes(TOKENIZER_JSON)
    make_adapter(tmp_path / "a", model, ["q_proj", "down_proj"])
    options = dict(adapter=(f"a={tmp_path / 'a'}",), speculator="ngram", num_draft_tokens=4, dtype="fp32")
    several, single = (load_draftable(tmp_path / "base", **options) for _ in range(2))
    single._multi_step, adapter = None, several.adapters.listed()["a"]
    letters = TOKENIZER.encode("abc" * 9, add_special_tokens=False).ids
    repeats = Constraint("regex", "(abc){6}")
    requests = [
        engine_request(f"{index}", letters[index:], 30, named=False, **of)
        for index, of in enumerate(
            [dict(constraint=repeats), dict(adapter=adapter), dict(constraint=repeats, adapter=adapter), dict()]
        )
    ]
    found, expected = run_to_end(several, requests), run_to_end(single, requests)
    check_same(found, expected, expected)
    assert found[requests[0].key].answer()[0][1] is FinishReason.STOP and num_accepted(several) > 10


@pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable())
def test_a_mask_that_cannot_be_found_ends_its_step(folders, monkeypatch):
    """Within a call, where C++ has asked for it."""
    engine = load_draftable(folders[0])
    request = replace(constrained(1, free=False)[0], sampling=SamplingParams())
    calls = itertools.count()

    def fill(*arguments):
        if next(calls) == 2:
            raise MemoryError("no memory")
        return step_masks.fill_mask(*arguments)

    monkeypatch.setattr(multi_step, "fill_mask", fill)
    with pytest.raises(MemoryError):
        run_to_end(engine, [request])


def test_answers_keep_to_their_constraints(folders):
    requests = constrained(80)
    records, _ = serve(load_draftable(folders[0]), requests)
    assert check_kept(requests, records) > 40


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["draft", "ngram", "auto"])
def test_speculated_or_not(folders, dtype, name):
    target, draft = folders
    requests = constrained(48, seed=1)
    plain, _ = serve(load_draftable(target, dtype=dtype), requests)
    options = {} if name == "ngram" else {"draft_model": draft}
    engine = load_draftable(target, dtype=dtype, num_draft_tokens=5, speculator=name, **options)
    records, _ = serve(engine, requests)
    check_same(records, plain, plain)
    assert num_accepted(engine) > 20
    assert check_kept(requests, records) > 20


def test_drafts_are_cut_by_the_grammar(folders, monkeypatch):
    """Whatever is proposed, what is verified may follow."""
    target, draft = folders
    engine, seen = load_draftable(target, speculator="draft", draft_model=draft, num_draft_tokens=6), []
    find = grammars.Vocabulary.new_masks
    monkeypatch.setattr(grammars.Vocabulary, "new_masks", lambda self, num: seen.append(num) or find(self, num))
    requests = constrained(24, seed=2, free=False)
    drafted = engine.speculator._ask

    def checked(proposer, budget):
        found = drafted(proposer, budget)
        for seq in engine.scheduler.running:
            assert seq.cursor.num_valid(seq.draft_ids) == len(seq.draft_ids)
        return found

    monkeypatch.setattr(engine.speculator, "_ask", checked)
    serve(engine, requests)
    assert max(seen) > 1


def test_preempted_answers_keep_to_their_constraints(folders):
    target, draft = folders
    long = (
        Constraint("regex", "[a-f]{100,}"),
        Constraint("json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 60})),
    )
    requests = [
        replace(request, min_tokens=0, constraint=long[index % 2])
        for index, request in enumerate(constrained(16, max_tokens=150, seed=3))
    ]
    plain, _ = serve(load_draftable(target), requests)
    engine = load_draftable(
        target, speculator="auto", draft_model=draft, num_draft_tokens=4, num_blocks=40, max_num_seqs=6
    )
    records, _ = serve(engine, requests)
    assert sum(record.ended.report.num_preemptions for record in records.values()) > 2
    check_same(records, plain, plain)


@pytest.mark.parametrize("name", ["off", "draft"])
def test_split_equals_whole(folders, name):
    target, draft = folders
    requests = constrained(32, seed=4)
    plain, _ = serve(load_draftable(target), requests)
    options = {} if name == "off" else {"draft_model": draft, "num_draft_tokens": 5}
    decode = load_draftable(target, speculator=name, **options)
    firsts, rest = hand_over(load_draftable(target), decode, requests)
    decode.step()
    check_empty(decode)
    for request in requests:
        check_handed_over(firsts, rest, request, plain[request.key])


@pytest.mark.parametrize("name", ["off", "draft"])
def test_a_constrained_answer_continues_on_another_engine(folders, name):
    """In the middle of a word of JSON: the place is found from the tokens."""
    target, draft = folders
    requests = [request for request in constrained(32, seed=5) if request.sampling.n == 1]
    plain, _ = serve(load_draftable(target), requests)
    moved = []
    for index, request in enumerate(requests):
        made = plain[request.key].tokens[0]
        if len(made) > 12:
            kept = made[: 1 + index % 10]
            moved.append((len(kept), replace(request, token_ids=(*request.token_ids, *kept), span_hashes=())))
    assert len(moved) > 8
    options = {} if name == "off" else {"draft_model": draft, "num_draft_tokens": 5}
    engine = load_draftable(target, speculator=name, **options)
    for num_kept, request in moved:
        records = Collector(first_index=num_kept)
        run_to_end(engine, [request], records)
        assert records[request.key].tokens[0] == plain[request.key].tokens[0][num_kept:]
        assert records[request.key].reasons == plain[request.key].reasons


def test_parked_and_resumed(folders):
    target, draft = folders
    requests = constrained(16, seed=6)
    plain, _ = serve(load_draftable(target), requests)
    engine = load_draftable(target, speculator="auto", draft_model=draft, num_draft_tokens=4)
    check_same(serve_parking(engine, requests, random.Random(0)), plain, plain)


def ask(folder, kind: str, text: str, **options) -> tuple[str, FinishReason | None, str]:
    """(text, reason, error) of one answer; every stop token is END."""
    request = engine_request("a", [1, 2, 3], **{"max_tokens": 30, "stop_token_ids": frozenset([END_ID]), **options})
    records, _ = serve(load_draftable(folder), [replace(request, constraint=Constraint(kind, text))])
    record = records[request.key]
    tokens, reason = record.answer().get(0, ([], None)) if not record.ended.error else ([], None)
    return TOKENIZER.decode(tokens), reason, record.ended.message


def test_a_finished_grammar_wins_over_min_tokens(folders):
    text, reason, _ = ask(folders[0], "choice", '["true"]', min_tokens=20)
    assert (text, reason) == ("true", FinishReason.STOP)


def test_min_tokens_hold_where_more_may_follow(folders):
    for seed in range(4):
        text, reason, _ = ask(folders[0], "regex", "[ab]+", min_tokens=12, temperature=1.0, seed=seed)
        assert len(text) >= 12 and reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_without_an_end_token_it_ends_where_nothing_may_follow(folders):
    text, reason, _ = ask(folders[0], "choice", '["null"]', stop_token_ids=frozenset())
    assert (text, reason) == ("null", FinishReason.STOP)
    text, reason, _ = ask(folders[0], "regex", "a+", stop_token_ids=frozenset())
    assert (text, reason) == ("a" * 30, FinishReason.LENGTH)


def test_a_stop_token_is_kept_for_the_end(folders):
    """Also one that the grammar could use: every answer that a token has ended is whole."""
    stop = TOKENIZER.token_to_id("b")
    for seed in range(6):
        text, reason, _ = ask(
            folders[0], "regex", "(ab?){3}", temperature=1.0, seed=seed, stop_token_ids=frozenset([stop])
        )
        assert (text, reason) in (("aaa", FinishReason.STOP), ("aaab", FinishReason.STOP))


def test_where_no_token_is_left_the_request_ends_with_the_reason(folders):
    stop = TOKENIZER.token_to_id("b")
    _, _, message = ask(folders[0], "regex", "ab+c", stop_token_ids=frozenset([stop]))
    assert message == "constraint: it leaves no token"


def test_an_answer_that_can_be_followed_no_further_is_not_whole(folders, monkeypatch):
    monkeypatch.setattr(grammar, "LLParserLimits", partial(grammar.LLParserLimits, max_items_in_row=20))
    _, reason, message = ask(folders[0], "grammar", 'start: "a" | "a" start', stop_token_ids=frozenset())
    assert reason is None and message.startswith("constraint: Parser Error: Current row has 21 items")


def test_a_constraint_that_does_not_compile_ends_its_request_alone(folders):
    engine = load_draftable(folders[0])
    bad = replace(engine_request("bad", [1, 2, 3]), constraint=Constraint("regex", "(a"))
    records, _ = serve(engine, [bad, engine_request("good", [1, 2, 3])])
    assert records[bad.key].ended.error == "constraint" and "unclosed group" in records[bad.key].ended.message
    assert not records[engine_request("good", [1]).key].ended.error


def test_others_go_on_while_a_grammar_compiles(folders, monkeypatch):
    """It waits alone, and may be cancelled."""
    engine, gate = load_draftable(folders[0]), threading.Event()
    compile = engine.grammars.vocabulary.compile
    monkeypatch.setattr(engine.grammars.vocabulary, "compile", lambda constraint: gate.wait() and compile(constraint))
    slow, gone, free = (engine_request(name, [1, 2, 3], 6) for name in ("slow", "gone", "free"))
    records = Collector()
    for request in (replace(slow, constraint=CONSTRAINTS[4]), replace(gone, constraint=CONSTRAINTS[5]), free):
        engine.submit(request)
    while records[free.key].ended is None:
        records.take(engine.step())
    assert records[slow.key].first is None
    engine.cancel(gone.key)
    records.take(engine.step())
    assert records[gone.key].ended.error == "cancelled"
    gate.set()
    while engine.has_work():
        records.take(engine.step())
    assert records[slow.key].ended.error == ""
    check_empty(engine)


@pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable())
def test_others_have_several_steps_in_a_call_while_a_grammar_compiles(gated, monkeypatch):
    """The bell that tells of a grammar ends the call."""
    monkeypatch.setattr(multi_step, "BUDGET_NS", 10**15)
    engine, gate, _ = gated
    calls, by_call = engine._multi_step._run, []
    monkeypatch.setattr(engine._multi_step, "_run", lambda *each: by_call.append(calls(*each)) or by_call[-1])
    slow, free = (
        replace(engine_request("slow", [1, 2, 3], 6), constraint=CONSTRAINTS[4]),
        engine_request("free", [1, 2, 3], 40),
    )
    records = Collector()
    for request in (slow, free):
        engine.submit(request)
    while records[free.key].ended is None:
        records.take(engine.step())
    assert records[slow.key].first is None and max(by_call) == multi_step.MAX_STEPS
    gate.set()
    run_to_end(engine, collector=records)
    assert records[slow.key].ended.error == ""


@pytest.mark.parametrize("is_read_again", [False, True])
def test_parked_while_its_grammar_compiles(gated, is_read_again):
    """Of what was posted meanwhile each counts, in order."""
    engine, gate, _ = gated
    request = replace(engine_request("a", [1, 2, 3], 6), constraint=CONSTRAINTS[4])
    admission, records = engine.admission, Collector(first_index=1)
    admission.admit(request)
    admission.set_aside(request.key, 3)
    admission.verify(request.key, 3)
    admission.fetch_settled(request.key)
    admission.start(request.key, (FirstToken(0, TOKENIZER.token_to_id("a")),))
    for post in [admission.park, admission.resume, admission.park][: 2 if is_read_again else 3]:
        post(request.key)
        records.take(engine.step())
    gate.set()
    while engine.has_work():
        records.take(engine.step())
    if not is_read_again:
        assert admission.groups[request.key].state is GroupState.PARKED
        assert engine.ledger.num_available == engine.num_blocks and not records[request.key].tokens
        admission.resume(request.key)
        run_to_end(engine, collector=records)
    assert records[request.key].ended.error == ""
    check_empty(engine)


def test_what_nobody_waits_for_is_not_compiled(gated, monkeypatch):
    """Its requests ended before its turn came, or were refused."""
    engine, gate, compiled = gated
    regexes = [Constraint("regex", f"a{{{n}}}") for n in range(1, 23)]
    requests = [replace(engine_request(each.text, [1, 2, 3], 2), constraint=each) for each in regexes]
    slow, gone, last = requests[0], requests[1:-1], requests[-1]
    engine.submit(slow)
    for request in gone:
        engine.submit(request)
        engine.cancel(request.key)
        engine.step()
    with monkeypatch.context() as patched, pytest.raises(Refusal):
        patched.setattr(engine.admission.shares, "has_blocks", lambda *_: False)
        engine.submit(replace(engine_request("refused", [1, 2, 3]), constraint=Constraint("regex", "b")))
    engine.submit(last)
    engine.submit(replace(gone[0], key=Key("again")))
    gate.set()
    while engine.has_work():
        engine.step()
    assert compiled == [slow.constraint, last.constraint, gone[0].constraint]
    check_empty(engine)


def test_tenants_take_turns_to_have_theirs_compiled(gated):
    """One that sends many, each of which takes seconds, makes nobody else wait for all of them. What several ask for is
    compiled for each: how soon it is there would tell a tenant what others use."""
    engine, gate, compiled = gated
    many = [Constraint("regex", f"a{{{n}}}") for n in range(1, 9)]
    own = Constraint("regex", "b")
    asked = [*((each, b"many") for each in many), (many[-1], b"few"), (own, b"other")]
    for index, (constraint, tenant) in enumerate(asked):
        request = engine_request(f"r{index}", [1, 2, 3], 2)
        engine.submit(replace(request, constraint=constraint, tenant_mark=tenant))
    gate.set()
    run_to_end(engine)
    assert compiled[0] == many[0] and set(compiled[1:3]) == {many[-1], own}
    assert sorted(compiled) == sorted([*many, many[-1], own])
    check_empty(engine)


def test_grammars_are_compiled_once_and_bounded(folders, monkeypatch):
    monkeypatch.setattr(grammars, "NUM_KEPT", 3)
    engine = load_draftable(folders[0])
    made = [engine.grammars.compile(Constraint("regex", f"a{{{n}}}"), b"") for n in (1, 2, 3, 3, 4)]
    assert made[2] is made[3] and len(engine.grammars._kept) == 3
    assert engine.grammars.compile(Constraint("regex", "a{1}"), b"") is not made[0]


def test_a_constraint_needs_no_thread_to_be_started(folders, monkeypatch):
    """One that could not be was refused with its blocks still promised, and no constraint was compiled any more."""
    engine = load_draftable(folders[0])

    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert engine.grammars.compile(CONSTRAINTS[0], b"").result(patience(30)) is not None


def test_an_engine_without_a_tokenizer_refuses(tmp_path):
    target, _ = make_target_and_draft(tmp_path)
    engine = load_draftable(target)
    assert engine.grammars is None
    with pytest.raises(ValueError, match="no grammars over this model's tokenizer"):
        engine.submit(replace(engine_request("a", [1, 2]), constraint=CONSTRAINTS[0]))
    engine.check_integrity()
    assert engine.ledger.num_available == engine.num_blocks
