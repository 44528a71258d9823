"""Workers that take part and do not do their part: what they say in place of an answer, and of their load."""

from collections.abc import Callable, Sequence

from baton.v1 import worker_pb2 as pb

MANNERS = (
    "silent", "twice", "capabilities", "load zero", "load garbage", "huge", "ended", "failed", "key index", "columns",
)  # fmt: skip
_MOST = (1 << 32) - 1


class Misbehavior:
    """`manner`: one of MANNERS."""

    def __init__(self, manner: str = ""):
        self.manner = manner

    @property
    def says_all_twice(self) -> bool:
        return self.manner == "twice"

    def replaces_answer_to(self, kind: str) -> bool:
        """Say whether a command of this kind gets no usual answer."""
        return self.manner not in ("", "twice") and kind in ("admit", "prefill", "offer", "attach")

    def events(self, kind: str, message, draw_first: Callable[[pb.RequestSpec], int]) -> Sequence[pb.Event]:
        """Return what is sent in place of an answer."""
        key = message.key
        if self.manner == "huge":
            return [pb.Event(ended=pb.Ended(key=key, code=13, message="x" * (8 << 20)))]
        if self.manner in ("ended", "failed"):
            code, reason = (13, "BROKEN") if self.manner == "failed" else (0, "")
            return [pb.Event(ended=pb.Ended(key=key, code=code, reason=reason))]
        if self.manner in ("key index", "columns") and kind in ("admit", "prefill"):
            nan, first = float("nan"), pb.FirstToken(token_id=draw_first(message.spec))
            rows = dict(key_index=[7] if self.manner == "key index" else [0, 0, 0], choice=[0], first_index=[1])
            return [
                pb.Event(granted=pb.Granted(key=key, num_cached_tokens=_MOST)),
                pb.Event(done=pb.Done(key=key, first_tokens=[first], queue_s=nan, prefill_s=-nan)),
                pb.Event(step_output=pb.StepOutput(keys=[key], num_ids=[1], token_ids=[9], **rows)),
            ]
        return []

    def load(self, honest: pb.Load) -> pb.Load:
        if self.manner == "load zero":
            return pb.Load()
        if self.manner == "load garbage":
            return pb.Load(
                step=(1 << 64) - 1, num_running=0, num_waiting=0, num_blocks_free=_MOST, num_blocks_total=1,
                tokens_per_s=float("nan"), state="\x1b[2J" * 50, blocks_by_holder=[_MOST] * 40,
                num_draft_tokens=(1 << 64) - 1,
            )  # fmt: skip
        return honest
