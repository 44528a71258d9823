"""The contract of a proposer, which guesses a sequence's next tokens. Read this first.

    open       begin a sequence that decodes here, as a Draftee
    prepare    catch up with prompts, chunk by chunk, with the tokens left of the step's budget
    propose    guess tokens for every sequence of the step that may speculate, all in one call
    advance    follow the step: which proposals were accepted, and the target's hidden states
    close      forget a sequence that ended, was cancelled, parked or preempted; an answer that may help later is kept

A proposal is only a guess: the target draws its own token at every proposed position, and a proposal counts when it is
that token. So a proposer may be wrong, short or silent, never harmful: no answer depends on it, and none is refused
because of it. A sequence that is parked or preempted is closed, and returns as another Draftee with all its tokens.

A proposer is used by the loop's thread alone. It holds its own memory, sized when it is made, none of it in the
target's KV pool. None of its state crosses a handoff. A module makes its proposer by

    load(folder: Path, model: Model, config: EngineConfig) -> Proposer

which raises ValueError (one line: what is wrong, and what to do) or ModelError if the folder does not fit the target:
another vocabulary, a larger model, a limit exceeded. A folder of heads has in its
config.json `"speculator": "medusa" | "eagle"`; a folder without that key is a draft model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from baton.engine.core.batch import ForwardBatch
from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Request
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model


@dataclass(slots=True, eq=False)
class Draftee:
    """One sequence as one proposer sees it, from its first decode step here until it ends, is parked or preempted."""

    request: Request
    choice: int
    token_ids: list[int]  # the live record, prompt and output: it grows by itself; read it, never change or keep it
    state: Any = None  # whatever the proposer wants to keep of the sequence


class DraftRequest(NamedTuple):
    """Ask for proposals of one sequence. Proposal j is at position len(draftee.token_ids) + j; its noise has the key
    noise_key(request.sampling.seed, draftee.choice, that position), which draft_sampling.draw uses."""

    draftee: Draftee
    num_tokens: int  # at most, and at least 1


class Advance(NamedTuple):
    """Describe a decode step of one sequence: token_ids has grown by num_accepted proposals and the target's own token.
    Rows [first_row, first_row + num_accepted + 1) of `hidden` are the target's at the positions [len(token_ids) -
    num_accepted - 2, len(token_ids) - 2]: of all tokens but the last, whose row the next step brings."""

    draftee: Draftee
    num_proposed: int
    num_accepted: int
    first_row: int


class PassLauncher(Protocol):
    """Run a model's passes on a GPU, as graphs where they exist; implemented in execute/launcher.py."""

    def run(self, batch: ForwardBatch, keeps_hidden: bool, on_layer: None) -> tuple[Tensor | None, Tensor]:
        """Run `batch`, made on the host; return the logits fp32 [R, vocab_size] second. They are valid until the next
        run."""
        ...


MakeLauncher = Callable[[Model, KVPool, EngineConfig], PassLauncher]


class Proposer(ABC):
    """Guess the next tokens of sequences; see the module. An exception from any method fails the step and its
    requests."""

    name: str  # draft | ngram | suffix | medusa | eagle | mtp
    wants_hidden: bool = False
    is_quick: bool = False  # asked for all its proposals before the number to verify is decided

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Return the bytes that it holds itself: weights, KV, and at most the state of all sequences."""

    def use_launcher(self, make: MakeLauncher) -> None:
        """Run the passes of a draft model by what `make` returns. Called once, on a GPU, before serving."""

    def open(self, draftee: Draftee) -> None:
        """Begin a sequence that decodes here. Its prompt may be long: leave work in proportion to it to `prepare`."""

    def prepare(self, draftees: Sequence[Draftee], num_tokens: int) -> int:
        """Work ahead on at most `num_tokens` tokens of open sequences that decode in this step; return how many were
        used."""
        return 0

    def num_unread(self, token_ids: Sequence[int], draftee: Draftee | None) -> int:
        """Return how many tokens `prepare` must process before it can propose for a sequence; `draftee` if that is
        open."""
        return 0

    @abstractmethod
    def propose(self, asks: Sequence[DraftRequest]) -> list[list[int]]:
        """Return for each ask the next token ids, best guess, in order: from none to ask.num_tokens of them."""

    def advance(self, advances: Sequence[Advance], hidden: Tensor | None) -> None:
        """Follow a decode step, for each open sequence in it that continues, whether it was asked for or not.

        `hidden`: [>= rows, hidden_size] in the compute dtype, the target's last layer before its final norm, where
        wants_hidden is set; else None. Only rows of decode steps on this worker are ever given, never those of a
        prompt, so that a sequence whose prompt was read elsewhere is guessed at alike. Copy what must be kept.
        """

    def close(self, draftee: Draftee) -> None:
        """Forget the sequence, except what it may keep of the answer. Its token_ids may have changed in length since
        the last call."""
