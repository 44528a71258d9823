"""Decode several steps, or one that verifies proposals, in one native call (native/layers/decode.cpp).

A step of a small model takes less time than the Python around it: with the demo model, Python was half of a lone
stream's time. The tokens of several steps also reach the client in one message. They are bit for bit those of single
steps. A call is made only while nothing but its sequences waits. It ends after the step in which a command is posted to
the engine or a sequence ends, or when another step would exceed BUDGET_NS.
"""

import ctypes
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from baton import failpoints
from baton.engine import native
from baton.engine.core.batch import AdapterRows
from baton.engine.execute.runner import Runner
from baton.engine.kv.native import native_pool
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.engine.models.fused import FusedLayers
from baton.engine.models.native_ends import has_native_ends, head_address, norm_address, table_address
from baton.engine.sampling.native_sampler import NativeRow, NativeSampler, changes_of, native_row
from baton.engine.sampling.sampler import Sampled, SampleRow, best_logprobs, sample_row
from baton.engine.sampling.step_masks import StepMasks, fill_mask
from baton.engine.schedule.scheduler import Scheduler
from baton.engine.schedule.sequence import Sequence
from baton.engine.schedule.steps import Drawn, Slice

MAX_STEPS = 8
BUDGET_NS = 4_000_000  # of one call: tokens reach a client no less evenly than the outbox sends them
_STEP_FAILPOINTS = ("engine.step", "engine.batch")  # failpoints that every step passes
_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_NEXT_MASKS = ctypes.CFUNCTYPE(_INT)
_ARGUMENTS = (
    _POINTER, _POINTER, _POINTER, _INT, _POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER, _INT,
)  # fmt: skip


class _Decoder(ctypes.Structure):
    """The struct `Decoder` of native/layers/decode.cpp."""

    _fields_ = [
        ("model", _POINTER),
        ("num_layers", _INT),
        *((name, _POINTER) for name in ("norm", "head", "table")),
        *((name, _DOUBLE) for name in ("embedding_scale", "logit_scale")),
        ("bell", _POINTER),
    ]


class _Decoding(ctypes.Structure):
    """The struct `Decoding` of native/layers/decode.cpp: one sequence."""

    _fields_ = [
        *((name, _INT) for name in ("token_id", "num_tokens")),
        *((name, _POINTER) for name in ("block_ids", "stop_ids")),
        *((name, _INT) for name in ("num_stop_ids", "has_penalties")),
        ("draft_ids", _POINTER),
        ("num_drafts", _INT),
        ("logits", _POINTER),
        ("mask_words", _INT),
        ("row", NativeRow),
    ]


class MultiStep:
    """Decodes several steps in one call, for a model that is native throughout. Belongs to the loop's thread."""

    def __init__(self, model: Model, pool: KVPool, bell: int):
        """Take the model, its pool, and the address of an int32 that is nonzero once a command waits."""
        library = native.library()
        assert library is not None and isinstance(model.fused, FusedLayers), "`of` has seen to it"
        self._held = (model, pool)  # what the structs point at
        self._hidden_size, self._dtype, self._vocab_size = model.spec.hidden_size, model.dtype, model.spec.vocab_size
        self._pool, self._adapters = native_pool(pool), model.fused.adapters
        self._decoder = _Decoder(
            model.fused.address, model.fused.num_layers, norm_address(model), head_address(model),
            table_address(model), model.spec.embedding_scale, model.spec.logit_scale, bell,
        )  # fmt: skip
        self._run = library.function("baton_decode", *_ARGUMENTS, restype=_INT)

    @classmethod
    def of(cls, runner: Runner, bell: int) -> "MultiStep | None":
        """Return one if all of a step is native (layers, ends, sampler), or None. Not called for engines of several
        ranks."""
        model = runner.model
        is_native = (
            isinstance(runner.sampler, NativeSampler)
            and runner.launcher.allows_multi_step
            and isinstance(model.fused, FusedLayers)
            and has_native_ends(model)
            and model.spec.logit_softcap is None
        )
        return cls(model, runner.pool, bell) if is_native else None

    def num_steps(self, slices: Seq[Slice], scheduler: Scheduler, most: int) -> int:
        """Return how many steps of these slices, at most `most`, may be computed in one call, and allocate their
        blocks.

        0 if there is more to do than decoding, or a constraint allows no token. Finds the sequences' masks.
        """
        if failpoints.is_armed(*_STEP_FAILPOINTS):
            return 0
        is_awaited = scheduler.waiting or len(scheduler.running) > len(slices)
        most = 1 if is_awaited else min(most, MAX_STEPS)
        for seq, begin, end in slices:
            num_tokens = _most_tokens(seq, end - begin)
            if num_tokens <= len(seq.draft_ids):
                return 0
            most = min(most, num_tokens)
            if most > 1:
                most = min(most, 1 + scheduler.room_for_draft(seq, most - 1))
        for seq, _, _ in slices:
            seq.find_masks()
            if seq.masks is not None and seq.masks.num_good == 0:
                return 0
        return most

    def __call__(
        self, slices: Seq[Slice], num_steps: int, keeps_hidden: bool
    ) -> tuple[list[Drawn], int, Tensor | None]:
        """Compute up to `num_steps` steps, or one if there are proposals.

        Returns the tokens of each sequence, the number of steps, and if `keeps_hidden` the rows that the first tokens
        were drawn from, before the final norm.
        """
        num_seqs, held, table = len(slices), [], (_Decoding * len(slices))()
        adapters, num_rows = [], 0
        width = max(num_steps, *(1 + len(seq.draft_ids) for seq, _, _ in slices))
        masks = [seq.pop_masks() for seq, _, _ in slices]
        following = FollowingMasks(slices, masks, table) if any(masks) else None
        logits = [self._room_for_logits(seq, width) for seq, _, _ in slices]
        for place, (seq, _, _), own_masks, rows in zip(table, slices, masks, logits, strict=True):
            num_own = 1 + len(seq.draft_ids)
            held += self._fill(place, seq, max(num_steps, num_own), own_masks)
            place.logits = None if rows is None else rows.data_ptr()
            if seq.group.adapter is not None:
                adapters.append(AdapterRows(num_rows, num_rows + num_own, seq.group.adapter))
            num_rows += num_own
        adapted = self._adapters.rows(adapters)
        hidden = torch.empty(num_rows, self._hidden_size, dtype=self._dtype) if keeps_hidden else None
        drawn, num_drawn = (_INT * (num_seqs * width))(), (_INT * num_seqs)()
        num_done = self._run(
            ctypes.addressof(self._decoder), ctypes.addressof(self._pool), table, num_seqs, adapted, len(adapted), num_steps,
            BUDGET_NS, None if following is None else following.address, None if hidden is None else hidden.data_ptr(), drawn,
            width, num_drawn, torch.get_num_threads(),
        )  # fmt: skip
        if following is not None:
            following.check()
        for index, (own_masks, (seq, _, _)) in enumerate(zip(masks, slices, strict=True)):
            if own_masks is not None and seq.draft_ids:
                num_drawn[index] = min(num_drawn[index], own_masks.num_good)
        runs = (drawn[first : first + count] for first, count in zip(range(0, num_seqs * width, width), num_drawn))
        tokens = [(piece.seq, _sampled(piece.seq, run, rows)) for piece, run, rows in zip(slices, runs, logits)]
        return tokens, num_done, hidden

    def _room_for_logits(self, seq: Sequence, num_tokens: int) -> Tensor | None:
        """Return room for the logits of each token, or None if no log-probabilities are asked for.

        Rows that the call does not reach are never touched and take no memory.
        """
        asked = seq.group.request.sampling.logprobs is not None
        return torch.empty(num_tokens, self._vocab_size) if asked else None

    @staticmethod
    def _fill(
        place: _Decoding, seq: Sequence, num_tokens: int, masks: StepMasks | None
    ) -> tuple[np.ndarray | array, ...]:
        """Fill `place` for up to `num_tokens` tokens, and return the arrays that it points to."""
        request = seq.group.request
        mask = None if masks is None else masks.rows[0]
        row = sample_row(request, request.sampling, seq.choice, seq.token_ids, mask=mask)
        changed, num_changed = _with_room(row, num_tokens)
        stops = array("q", () if row.min_tokens_left_bans else request.stop_token_ids)
        if masks is not None:
            masks.rows[masks.num_good :] = -1  # tokens drawn there are cut later; the rows stay, as those of adapters
            # count them
        blocks, draft = array("q", seq.blocks.ids), array("q", seq.draft_ids)
        place.token_id, place.num_tokens = seq.token_ids[-1], seq.num_tokens
        place.block_ids, place.stop_ids = blocks.buffer_info()[0], stops.buffer_info()[0]
        place.num_stop_ids, place.has_penalties = len(stops), row.params.has_penalties
        place.draft_ids, place.num_drafts = draft.buffer_info()[0], len(draft)
        place.mask_words = len(mask) if mask is not None and draft else 0
        place.row = native_row(row, changed, num_changed)
        if row.params.has_penalties:
            place.row.changes = changed.ctypes.data
        return changed, stops, blocks, draft


def compute(
    runner: Runner, several: MultiStep | None, slices: list[Slice], scheduler: Scheduler,
    on_layer: Callable[[int], None] | None, most: int,
) -> tuple[list[Drawn], int]:  # fmt: skip
    """Compute a step, or up to `most` steps in one call of `several`; return the tokens and the number of steps.

    Sets `runner.hidden` as Runner.run does.
    """
    runner.threads.begin(sum(end - begin + len(seq.draft_ids) for seq, begin, end in slices))
    drawn, num_steps = _compute(runner, several, slices, scheduler, on_layer, most)
    runner.threads.end(num_steps)
    return drawn, num_steps


def _compute(
    runner: Runner, several: MultiStep | None, slices: list[Slice], scheduler: Scheduler,
    on_layer: Callable[[int], None] | None, most: int,
) -> tuple[list[Drawn], int]:  # fmt: skip
    if several is not None and (num_steps := several.num_steps(slices, scheduler, most)):
        drawn, num_steps, runner.hidden = several(slices, num_steps, runner.keeps_hidden)
        return drawn, num_steps
    return runner.run(slices, on_layer), 1


def _most_tokens(seq: Sequence, num_tokens: int) -> int:
    """Return how many tokens a sequence with a slice of `num_tokens` may draw before the host has to look at it."""
    group, request = seq.group, seq.group.request
    if num_tokens != 1 or not group.prefilled:
        return 0
    num_left = request.max_tokens - seq.num_output
    num_early = request.min_tokens - seq.num_output  # while stop tokens are banned
    return min(num_left, num_early) if num_early > 0 else num_left


def _sampled(seq: Sequence, token_ids: list[int], logits: Tensor | None) -> list[Sampled]:
    count = seq.group.request.sampling.logprobs
    if logits is None or count is None:
        return [Sampled(token_id, None) for token_id in token_ids]
    found = best_logprobs(logits[: len(token_ids)], token_ids, count)
    return [Sampled(*each) for each in zip(token_ids, found, strict=True)]


class FollowingMasks:
    """The callback `NextMasks` of native/layers/decode.cpp, called with the GIL after each step of several.

    It writes the next step's mask into the first mask of each sequence.
    """

    def __init__(self, slices: Seq[Slice], masks: Seq[StepMasks | None], table: ctypes.Array[_Decoding]):
        """Take the slices with their masks, and the `table` in which the call writes each sequence's last token."""
        self._parts = [
            (piece.seq, own.rows[0].numpy(), place, piece.seq.group.request.min_tokens > piece.seq.num_output)
            for piece, own, place in zip(slices, masks, table, strict=True)
            if own is not None
        ]
        self._error: BaseException | None = None
        self._call = _NEXT_MASKS(self._find)
        self.address = ctypes.cast(self._call, _POINTER).value

    def check(self) -> None:
        """Raise the error that a callback raised, if any."""
        del self._call  # breaks the reference cycle
        if self._error is not None:
            raise self._error

    def _find(self) -> bool:
        try:
            return all(self._may_go_on(*part) for part in self._parts)
        except BaseException as error:  # ctypes would swallow it and return any number
            self._error = error
            return False

    @staticmethod
    def _may_go_on(seq: Sequence, mask: np.ndarray, place: _Decoding, is_early: bool) -> bool:
        """Advance a sequence's cursor and fill its next mask; return whether its answer may continue.

        `is_early` holds for the whole call, which never passes min_tokens.
        """
        cursor = seq.cursor
        return cursor.advance(place.token_id) and not fill_mask(
            mask, cursor, seq.group.request.stop_token_ids, is_early
        )


def _with_room(row: SampleRow, num_tokens: int) -> tuple[np.ndarray, int]:
    """Return the tokens whose logits change, with room for those to be drawn, and their number."""
    changed = changes_of(row)
    if not row.params.has_penalties:
        return changed, len(changed) // 3
    return np.concatenate([changed, np.zeros(3 * num_tokens, np.int32)]), len(changed) // 3
