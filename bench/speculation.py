"""Measure the gain of speculation on this machine: python bench/speculation.py [--quick] [--json FILE].

Bare engines of one model, plain and with each proposer, run in turn on three texts and on questions that are asked
again. Every comparison has an A/A pair, plain against plain. Speed is that of decoding: output tokens over the time
after the last prompt was read. Losses are looked for in CPU time, which other load on the machine disturbs less. For
the cost of the mechanism at a given acceptance, also on a GPU, see bench/forced.py."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import gc
import itertools
import math
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch reads it when it is loaded

import torch

from baton.engine.core.device import product_dtype
from baton.engine.engine import Engine
from baton.training.data.corpus import gather
from baton.training.data.tokenizer import load_tokenizer
from baton.training.model.evaluate import select_heads
from bench.lib.decoding import Decoded, decode, greedy
from bench.lib.paths import MODEL, ROOT
from bench.lib.report import Report, finish, interleave, medians, start
from tests.support import bare_engine

FOLDERS = {"ngram": None, **{name: ROOT / "demo" / name for name in ("draft", "medusa", "eagle")}}
PUBLISHED = {"edit": 2.5, "code": 1.8, "shuffled": 1.3}  # times plain, for such texts
GOALS = {("edit", "ngram"): 2.5, ("code", "best"): 1.8}
NOISE = 0.05  # between two plain runs: if they differ as much, a low end says nothing
BATCHES = (1, 4, 16, 64)
WARM_ROUNDS = 8  # of a text
FIXED_WIDTH = 4  # of the acceptance rows
PROMPT, OUTPUT = 256, 128  # tokens
EDIT_EVERY = 16  # tokens of the passage between two edits
REPEATED = 0.7  # share of an edit task's answer that must be in its prompt, or of an answer in the earlier one
AGAIN_CUT = 64  # tokens at the beginning that a question lacks when it is asked again


# ---- engines ----


@dataclass(frozen=True)
class Run:
    """One batch, and the parts of its decoding time in the model's and in the proposers' calls."""

    decoded: Decoded
    verify_s: float
    draft_s: float


@dataclass
class Arm:
    """One engine, its time in calls of the model and of proposers, and its measurements."""

    engine: Engine
    spent_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    runs: list[Run] = field(default_factory=list)
    request_ids: itertools.count = field(default_factory=itertools.count)

    @classmethod
    def load(cls, **options) -> "Arm":
        arm = cls(bare_engine.load_engine(MODEL, num_blocks=1024, **options))
        arm._watch(arm.engine.runner, "run", "verify")
        if arm.engine._multi_step is not None:  # if a whole step is native
            arm._watch(arm.engine._multi_step, "_run", "verify")
        for proposer in arm.engine.speculator.proposers.values():
            for name in ("prepare", "propose", "advance"):
                arm._watch(proposer, name, "draft")
        return arm

    def _watch(self, owner: object, name: str, kind: str) -> None:
        call = getattr(owner, name)

        def watched(*args, **kwargs):
            begun = time.perf_counter()
            result = call(*args, **kwargs)
            self.spent_s[kind] += time.perf_counter() - begun
            return result

        setattr(owner, name, watched)

    def run(self, prompts: Sequence[Sequence[int]], num_output: int, width: int | None = None) -> Decoded:
        """Return greedy answers of `num_output` tokens. `width`: proposals in every step; None: as many as pay off."""
        return decode(self.engine, greedy(self.request_ids, prompts, num_output, width), self.spent_s.clear)

    def measure(self, prompts: Sequence[Sequence[int]], num_output: int) -> Run:
        """Run prompts with as many proposals as pay off, and record the run."""
        decoded = self.run(prompts, num_output)
        self.runs.append(Run(decoded, self.spent_s["verify"], self.spent_s["draft"]))
        return self.runs[-1]

    def useful_share(self) -> float:
        """Return the share of decoding time in verification and drafting; the rest is overhead."""
        return statistics.median((run.verify_s + run.draft_s) / run.decoded.decode_s for run in self.runs)


def proposers() -> dict[str, Path | None]:
    """Return the proposers whose weights are here, with their folders."""
    return {name: folder for name, folder in FOLDERS.items() if folder is None or folder.exists()}


# ---- texts ----


class Texts:
    """Prompts of three kinds from held-out modules of the standard library, each drawn once."""

    def __init__(self, plain: Arm, num_tasks: int):
        self._plain, self._rng = plain, random.Random(0)
        tokenizer = load_tokenizer(MODEL)
        documents = gather().held_out
        heads = select_heads(documents, 200)
        self._rng.shuffle(heads)
        self._contexts = [ids[-PROMPT:] for head in heads if len(ids := tokenizer.encode(head.text).ids) >= PROMPT]
        tokens = [token_id for document in documents for token_id in tokenizer.encode(document.text).ids]
        self._shuffled = self._rng.sample(tokens, len(tokens))
        self.edits = self._edit_tasks(num_tasks)
        self.questions = self._questions(num_tasks)

    def prompts(self, text: str, number: int) -> list[list[int]]:
        """Return the one prompt of round `number`."""
        if text == "shuffled":
            return self.shuffled(1, PROMPT, number)
        prompts = self.edits if text == "edit" else self._contexts
        return [prompts[number % len(prompts)]]

    def shuffled(self, num_prompts: int, length: int, number: int) -> list[list[int]]:
        begin = number * num_prompts * length
        ids = [self._shuffled[(begin + index) % len(self._shuffled)] for index in range(num_prompts * length)]
        return [ids[index : index + length] for index in range(0, len(ids), length)]

    def _edit_tasks(self, count: int) -> list[list[int]]:
        """Return prompts that ask to "write this again, corrected": a passage with every 16th token changed, and the
        lines before the passage twice.

        The passage is what the model itself writes there, since the demo model follows no instructions; only tasks
        whose answer repeats the prompt are used."""
        tasks = []
        for context in self._contexts:
            (passage,) = self._plain.run([context], OUTPUT, width=0).answers
            for place in range(EDIT_EVERY - 1, len(passage), EDIT_EVERY):
                passage[place] = self._rng.randrange(5, 4096)
            prompt = [*context, *passage, *context]
            (answer,) = self._plain.run([prompt], OUTPUT, width=0).answers
            if repeated(answer, prompt) >= REPEATED:
                tasks.append(prompt)
            if len(tasks) == count:
                break
        return tasks

    def _questions(self, count: int) -> list[list[int]]:
        """Return questions whose answer comes again if they are asked without their beginning."""
        found = []
        for context in self._contexts:
            first, again = (
                self._plain.run([ids], OUTPUT, width=0).answers[0] for ids in (context, context[AGAIN_CUT:])
            )
            if repeated(again, first) >= REPEATED:
                found.append(context)
            if len(found) == count:
                break
        return found


def repeated(answer: Sequence[int], prompt: Sequence[int], length: int = 4) -> float:
    """Return the share of the answer's runs of `length` tokens that occur in the prompt, or in another answer."""
    known = {tuple(prompt[index : index + length]) for index in range(len(prompt) - length + 1)}
    runs = [tuple(answer[index : index + length]) for index in range(len(answer) - length + 1)]
    return sum(run in known for run in runs) / len(runs)


# ---- rows ----


def compare(report: Report, arms: dict[str, Arm], texts: Texts, text: str, num_rounds: int) -> None:
    """Compare every proposer on one text at batch 1 with plain decoding in the same rounds."""
    runs = rounds(arms, lambda number: texts.prompts(text, number), OUTPUT, num_rounds)
    found = medians({name: [run.tokens_per_s for run in each] for name, each in runs.items()})
    plain, again = found.pop("plain"), found.pop("plain again")
    name = {"code": "held-out code"}.get(text, text)
    for proposer, speed in found.items():
        goal = GOALS.get((text, proposer))
        report.add(
            f"{name}: {proposer} over plain (published: {PUBLISHED[text]} x)", speed, "tokens/s", against=plain,
            goal=f"ratio >= {goal}" if goal else "",
        )  # fmt: skip
    report.add(f"{name}: A/A, plain over plain", again, "tokens/s", against=plain)
    low_ends(report, runs, name)
    best = max(found.keys() - {"auto"}, key=found.get)
    if goal := GOALS.get((text, "best")):
        row = f"{name}: best proposer ({best}) over plain"
        report.add(row, found[best], "tokens/s", against=plain, goal=f"ratio >= {goal}")
    row = f"{name}: auto over the best proposer ({best})"
    report.add(row, found["auto"], "tokens/s", against=found[best], goal="ratio >= 0.95")
    for proposer, speed in found.items():
        ideal = speed / arms[proposer].useful_share()
        report.add(f"{name}: {proposer} over its ideal", speed, "tokens/s", against=ideal, goal="ratio >= 0.88")
    if text == "code" and (losers := [each for each, speed in found.items() if speed < found["ngram"]]):
        print(f"{name}: slower than ngram: {', '.join(losers)}")


def asked_again(report: Report, arms: dict[str, Arm], texts: Texts, num_rounds: int) -> None:
    """Measure the speed-up of an answer that was given before, to another prompt of the tenant, and is in no prompt."""

    def once(arm: Arm) -> Callable[[], Decoded]:
        numbers = itertools.count()

        def measured() -> Decoded:
            question = texts.questions[next(numbers) % len(texts.questions)]
            arm.run([question], OUTPUT)
            return arm.measure([question[AGAIN_CUT:]], OUTPUT).decoded

        return measured

    calls = {name: once(arm) for name, arm in arms.items()} | {"plain again": once(arms["plain"])}
    interleave(calls, min(WARM_ROUNDS, num_rounds))
    runs = interleave(calls, num_rounds)
    found = medians({name: [run.tokens_per_s for run in each] for name, each in runs.items()})
    plain, again = found.pop("plain"), found.pop("plain again")
    for proposer, speed in found.items():
        report.add(f"asked again: {proposer} over plain", speed, "tokens/s", against=plain)
    report.add("asked again: A/A, plain over plain", again, "tokens/s", against=plain)
    low_ends(report, runs, "asked again")


def rounds(
    arms: dict[str, Arm], prompts: Callable[[int], list[list[int]]], num_output: int, num_rounds: int
) -> dict[str, list[Decoded]]:
    """Run rounds of each arm, with the same prompts for all in each; "plain again" runs at the other end of a round
    from "plain"."""

    def once(arm: Arm) -> Callable[[], Decoded]:
        numbers = itertools.count()
        return lambda: arm.measure(prompts(next(numbers)), num_output).decoded

    calls = {name: once(arm) for name, arm in arms.items()} | {"plain again": once(arms["plain"])}
    interleave(calls, min(WARM_ROUNDS, num_rounds))  # after these the proposers' costs are known
    for arm in arms.values():
        arm.runs.clear()
    return interleave(calls, num_rounds)


def acceptance(report: Report, arms: dict[str, Arm], texts: Texts, text: str, num_prompts: int) -> None:
    """Measure the share of proposals that the target drew too, with the same number of proposals per step for all
    proposers."""
    for proposer, arm in arms.items():
        if proposer in ("plain", "auto"):  # auto is ngram, or eagle if ngram proposes nothing
            continue
        runs = [arm.run(texts.prompts(text, number), OUTPUT, width=FIXED_WIDTH) for number in range(num_prompts)]
        num_proposed = sum(run.num_proposed for run in runs)
        row = f"{text}: {proposer}, accepted of {FIXED_WIDTH} proposed"
        report.add(row, sum(run.num_accepted for run in runs) / max(1, num_proposed), "share")


def never_below(report: Report, arms: dict[str, Arm], texts: Texts, batch_size: int, num_rounds: int) -> None:
    """Measure speculation at a batch that runs to its end, where the sequence that gains least decides."""

    def prompts(number: int) -> list[list[int]]:
        return texts.shuffled(batch_size, 32, number)

    runs = rounds(arms, prompts, 64, num_rounds)
    found = medians({name: [run.tokens_per_s for run in each] for name, each in runs.items()})
    name = f"batch {batch_size}, shuffled"
    report.add(f"{name}: auto over plain", found["auto"], "tokens/s", against=found["plain"])
    low_ends(report, runs, name)


def low_ends(report: Report, runs: dict[str, list[Decoded]], name: str) -> None:
    """Check that there is never a loss in CPU time, round by round, against the mean of the two plain runs. Where those
    differ by as much as a loss would, nothing is said."""
    speeds = {arm: [run.tokens_per_cpu_s for run in each] for arm, each in runs.items()}
    pairs = list(zip(speeds.pop("plain"), speeds.pop("plain again"), strict=True))
    low, high = interval([again / plain for plain, again in pairs])
    spread = max(1 - low, high - 1, 0.0)
    report.add(f"{name}: A/A spread", spread, "of 1", goal=f"value < {NOISE}")
    void = f": VOID, two plain runs differ by {NOISE:.0%} or more" if spread >= NOISE else ""
    for arm in sorted(speeds):
        low, _ = interval([2 * speed / sum(pair) for speed, pair in zip(speeds[arm], pairs, strict=True)])
        report.add(f"{name}: {arm} over plain, low end{void}", low, "x", goal="" if void else "value >= 0.98")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, from order statistics."""
    ordered, count = sorted(values), len(values)
    below, rank = 0.5**count, 0
    while below + math.comb(count, rank + 1) * 0.5**count <= 0.025:
        rank += 1
        below += math.comb(count, rank) * 0.5**count
    return ordered[rank], ordered[-1 - rank]


def against_transformers(report: Report, arms: dict[str, Arm], texts: Texts, num_rounds: int) -> None:
    """Compare with transformers' assisted generation with the same two models, prompts included on both sides."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folders = (MODEL, FOLDERS["draft"])
    target, draft = (AutoModelForCausalLM.from_pretrained(folder, dtype=product_dtype()).eval() for folder in folders)
    options = dict(max_new_tokens=OUTPUT, min_new_tokens=OUTPUT, do_sample=False, pad_token_id=0)

    def theirs(number: int, **more) -> float:
        token_ids = torch.tensor(texts.prompts("code", number))
        begun = time.perf_counter()
        output = target.generate(token_ids, attention_mask=torch.ones_like(token_ids), **options, **more)
        return (output.shape[1] - token_ids.shape[1]) / (time.perf_counter() - begun)

    def ours(name: str, number: int) -> float:
        run = arms[name].run(texts.prompts("code", number), OUTPUT)
        return OUTPUT / run.total_s

    def once(call: Callable[..., float], *args, **more) -> Callable[[], float]:
        numbers = itertools.count()
        return lambda: call(*args, next(numbers), **more)

    calls = {
        "assisted": once(theirs, assistant_model=draft),
        "transformers": once(theirs),
        **{name: once(ours, name) for name in arms},
    }
    interleave(calls, 1)
    found = medians(interleave(calls, num_rounds))
    assisted = found.pop("assisted")
    report.add("transformers: assisted over plain", assisted, "tokens/s", against=found.pop("transformers"))
    for name, speed in found.items():
        goal = "ratio >= 1.5" if name == "draft" else ""
        report.add(f"held-out code: {name} over transformers assisted", speed, "tokens/s", against=assisted, goal=goal)


def main() -> int:
    arguments, report = start("speculation", "Speed-up by speculation, on three texts and at four batch sizes.")
    quick = arguments.quick
    plain = Arm.load()
    texts = Texts(plain, 2 if quick else 12)
    print(f"{len(texts.edits)} edit tasks, {len(texts.questions)} questions")
    found = proposers()
    for name in FOLDERS.keys() - found.keys():
        print(f"{name}: not measured, {FOLDERS[name].relative_to(ROOT)} is not there")
    arms = {"plain": plain}
    arms |= {name: Arm.load(speculator=name, draft_model=folder) for name, folder in found.items()}
    arms["auto"] = Arm.load(speculator="auto", draft_model=found["eagle"])
    gc.freeze()  # the collector need not examine what is loaded now
    for text in PUBLISHED:
        acceptance(report, arms, texts, text, 1 if quick else 8)
    for text in PUBLISHED:
        compare(report, arms, texts, text, 3 if quick else 48)
    looking = {"plain": plain, "ngram": arms["ngram"], "suffix": Arm.load(speculator="suffix")}
    asked_again(report, looking, texts, 3 if quick else 48)
    left_on = {"plain": plain, "auto": arms["auto"]}
    for batch_size in BATCHES[:2] if quick else BATCHES:
        never_below(report, left_on, texts, batch_size, 4 if quick else 48 if batch_size < 64 else 24)
    against_transformers(report, {name: arms[name] for name in (*found, "auto")}, texts, 1 if quick else 10)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
