"""The invariants, applied after every case to what clients saw and to what the processes say of themselves.

I-1 indices without gap or repeat            I-6 only what we killed died; no fault in a log that was not handled
I-2 tokens of the undisturbed answer         I-7 the gateway's counters agree with the history
I-3 one end a request                        I-8 probes are answered afterwards (world.py)
I-4 a status that the case allows, reasoned  I-9 no secret text in logs, metrics, Redis
I-5 the ledgers balance, and end at zero; so do all tables
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families as parse

from tests.support.faults.history import Ask
from tests.support.faults.reference import Reference

SECRET_TEXT = "Xyzzy-plugh-canary"
# What the gateway calls the endings that a client sees.
_OUTCOMES = {"OK": "ok", "CANCELLED": "cancelled"}
_REFUSED = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "ALREADY_EXISTS", "NOT_FOUND")
_OF_ORPHANS = ("keys", "keys_orphaned", "token_records", "engine_keys")
# Its client's clock may end such a request before the gateway's does.
_BY_CLIENT = ("CANCELLED", "DEADLINE_EXCEEDED")


def check_history(
    asks: Iterable[Ask], reference: Reference, allowed: Collection[str], reasons: bool = True
) -> list[str]:
    """Return what is wrong with what clients saw, in words. `reasons`: a status must have one; not where the gateway
    itself is gone."""
    return [f"{ask.request_id}: {fault}" for ask in asks for fault in _faults(ask, reference, allowed, reasons)]


def _faults(ask: Ask, reference: Reference, allowed: Collection[str], reasons: bool) -> list[str]:
    faults = [f"I-3 {fault}" for fault in ask.faults]
    if ask.ended is None:
        return [*faults, "I-3 it has not ended"]
    if ask.status not in allowed and not (ask.status == "CANCELLED" and ask.was_cancelled):
        faults.append(f"I-4 {ask.words()}, allowed: {', '.join(sorted(allowed))}")
    if reasons and ask.status not in ("OK", *_BY_CLIENT) and not ask.reason:
        faults.append(f"I-4 {ask.words()} has no reason")
    if not isinstance(ask.prompt, str) and ask.num_tokens:
        faults += _token_faults(ask, reference)
    if ask.status == "OK":
        num_wanted = ask.max_tokens * ask.sampling.get("n", 1)
        if ask.num_tokens != num_wanted or ask.usage is None or ask.usage.output_tokens != num_wanted:
            told = ask.usage.output_tokens if ask.usage else "nothing"
            faults.append(f"I-1 {num_wanted} tokens were asked for, {ask.num_tokens} arrived, {told} were reported")
        if len(ask.finished) != ask.sampling.get("n", 1):
            faults.append(f"I-3 {len(ask.finished)} choices have ended")
    return faults


def _token_faults(ask: Ask, reference: Reference) -> list[str]:
    sampling = dict(ask.sampling)
    if sampling.get("temperature") and "seed" not in sampling:
        sampling["seed"] = ask.seed  # drawn by the gateway, and returned
    faults = []
    for choice, whole in reference.tokens(ask.prompt, ask.max_tokens, sampling).items():
        got = ask.tokens.get(choice, [])
        if got != whole[: len(got)]:
            at = next(index for index, (a, b) in enumerate(zip([*got, None], [*whole, None], strict=False)) if a != b)
            faults.append(f"I-2 choice {choice} differs at token {at} of {len(got)}: {got[at : at + 4]}, undisturbed "
                          f"{whole[at : at + 4]}")  # fmt: skip
    return faults


class Counters:
    """A gateway's counters and open requests."""

    def __init__(self, admin: str):
        families = parse(urlopen(f"http://{admin}/metrics", timeout=10).read().decode())
        samples = [sample for family in families for sample in family.samples]
        self.outcomes: Counter[str] = Counter()
        for sample in samples:
            if sample.name == "baton_requests_total":
                self.outcomes[sample.labels["outcome"]] += int(sample.value)
        self.num_migrations = sum(sample.value for sample in samples if sample.name == "baton_migrations_total")
        self.num_lost_lines = sum(sample.value for sample in samples if sample.name == "baton_log_lines_lost")
        self.num_running = sum(sample.value for sample in samples if sample.name == "baton_requests_running")


def check_tables(page: dict) -> list[str]:
    """Return tables that are not empty, in words. `page`: /fleet.json of a gateway. What is orphaned waits for its
    resume window, and holds no blocks."""
    faults = []
    for view in page["workers"]["workers"]:
        tables = view["load"]["tables"]
        if "keys" not in tables:
            faults.append(f"I-5 {view['address']} does not say what its tables hold")
        orphaned = tables.get("keys_orphaned", 0)
        for name, count in tables.items():
            allowed = orphaned if name in _OF_ORPHANS else 0
            if count > allowed:
                faults.append(f"I-5 {view['address']}: {count} {name} are left")
    return faults


def check_counters(before: Counters, after: Counters, asks: Sequence[Ask]) -> list[str]:
    """Requests that the client gave up may not have come, or may have been answered: the others must agree."""
    counted = after.outcomes - before.outcomes
    seen = Counter(_outcome(ask.status) for ask in asks)
    num_open = sum(ask.status in _BY_CLIENT for ask in asks)
    faults = [
        f"I-7 {counted[outcome]} requests {outcome} by the gateway's count, {seen[outcome]} by the clients'"
        for outcome in ("ok", "refused", "failed")
        if not seen[outcome] <= counted[outcome] <= seen[outcome] + num_open
    ]
    if counted.total() > len(asks):
        faults.append(f"I-7 {counted.total()} requests by the gateway's count, {len(asks)} by the clients'")
    return faults


def _outcome(status: str) -> str:
    if status == "DEADLINE_EXCEEDED":
        return "given up"
    return "refused" if status in _REFUSED else _OUTCOMES.get(status, "failed")


def check_privacy(texts: dict[str, str]) -> list[str]:
    return [f"I-9 {where} shows what a client wrote" for where, text in texts.items() if SECRET_TEXT in text]
