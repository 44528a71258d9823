"""The contract of a proposer, which guesses a sequence's next tokens. Read this first.

    open       a sequence decodes here: a Draftee is made for it
    prepare    tokens of the step's budget that are left over: catch up with prompts, chunk by chunk
    propose    for every sequence of the step that may speculate some tokens, all sequences in one call
    advance    the step has passed: what was accepted, and the target's hidden states of it
    close      the sequence ended, was cancelled, parked or preempted: forget it, but for an answer that may help later

A proposal is only a guess: the target draws its own token at every proposed position, and a proposal counts when it is
that token. So a proposer may be wrong, short or silent, never harmful: no answer depends on it, and none is refused
because of it. A sequence that is parked or preempted is closed and comes back as another Draftee with all of its
tokens.

A proposer belongs to the loop's thread. Its memory is its own and is sized when it is made: none of it is in the
target's KV pool. Nothing of it crosses a handoff. It is made by

    load(folder: Path, model: Model, config: EngineConfig) -> Proposer

of its module, which raises ValueError (one line: what is wrong, and what to do) or ModelError where folder and target
do not go together: another vocabulary, larger than the target, a limit exceeded. A folder of heads has in its
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
    """Proposal j is at position len(draftee.token_ids) + j; its noise has the key
    noise_key(request.sampling.seed, draftee.choice, that position): draft_sampling.draw does it."""

    draftee: Draftee
    num_tokens: int  # at most, and at least 1


class Advance(NamedTuple):
    """A decode step of one sequence: token_ids has grown by num_accepted proposals and the target's own token after
    them. Rows [first_row, first_row + num_accepted + 1) of `hidden` are the target's at the positions
    [len(token_ids) - num_accepted - 2, len(token_ids) - 2]: of all tokens but the last, whose row the next step brings.
    """

    draftee: Draftee
    num_proposed: int
    num_accepted: int
    first_row: int


class PassLauncher(Protocol):
    """Runs a model's passes on a GPU, as graphs where there are any; execute/launcher.py has it."""

    def run(self, batch: ForwardBatch, keeps_hidden: bool, on_layer: None) -> tuple[Tensor | None, Tensor]:
        """Run `batch`, made on the host, and return the logits fp32 [R, vocab_size] second; they last until the next
        run."""
        ...


MakeLauncher = Callable[[Model, KVPool, EngineConfig], PassLauncher]


class Proposer(ABC):
    """See the module. An exception of any method fails the step, and with it its requests."""

    name: str  # draft | ngram | suffix | medusa | eagle | mtp
    wants_hidden: bool = False
    is_quick: bool = False  # asked for all it has before it is decided how much of it is verified

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory that it holds for itself: weights, KV, what is kept of sequences (at most)."""

    def use_launcher(self, make: MakeLauncher) -> None:
        """Run passes of a model of its own by what `make` returns. Called once, on a GPU, before serving."""

    def open(self, draftee: Draftee) -> None:
        """A sequence begins to decode here. Its prompt may be long: leave work in proportion to it to `prepare`."""

    def prepare(self, draftees: Sequence[Draftee], num_tokens: int) -> int:
        """Work ahead on at most `num_tokens` tokens of open sequences that decode in this step; how many were used."""
        return 0

    def num_unread(self, token_ids: Sequence[int], draftee: Draftee | None) -> int:
        """Tokens that `prepare` has yet to work on before it can propose for a sequence; `draftee` where it is open."""
        return 0

    @abstractmethod
    def propose(self, asks: Sequence[DraftRequest]) -> list[list[int]]:
        """Return for each ask the next token ids, best guess, in order: from none to ask.num_tokens of them."""

    def advance(self, advances: Sequence[Advance], hidden: Tensor | None) -> None:
        """Follow a decode step, for each open sequence in it that continues, whether it was asked for or not.

        `hidden`: [>= rows, hidden_size] in the compute dtype, the target's last layer before its final norm, where
        wants_hidden is set; else None. Only rows of decode steps on this worker are ever given, never those of a
        prompt, so that a sequence whose prompt was read elsewhere is guessed at alike. Copy what must be kept."""

    def close(self, draftee: Draftee) -> None:
        """Forget the sequence, but for what it may keep of its answer. Its token_ids may be longer or shorter than at
        the last call."""
