"""The worker-seconds of a request by role, within the SLO, by the model of `baton plan`."""

from typing import Protocol

from baton.planning.step_time import StepTimes
from baton.service.slo import Slo

_BATCHES = (256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)


class LoadModel(Protocol):
    """Seconds of one worker's time that a request takes."""

    def read_s(self, prompt_tokens: float) -> float: ...

    def write_s(self, prompt_tokens: float, output_tokens: float) -> float: ...

    def token_s(self, num_streams: float, context: float) -> float:
        """Return the seconds per token of each of `num_streams` streams on one worker."""
        ...


class StepModel:
    """A LoadModel by step times: a prompt has its worker to itself, an answer shares its steps with as many others as
    the SLO allows."""

    def __init__(self, times: StepTimes, slo: Slo, max_num_seqs: int, chunk: int):
        self.times, self._slo, self._max_num_seqs, self._chunk = times, slo, max_num_seqs, chunk

    def read_s(self, prompt_tokens: float) -> float:
        return self.times.prefill_s(max(1, round(prompt_tokens)), self._chunk)

    def write_s(self, prompt_tokens: float, output_tokens: float) -> float:
        context = prompt_tokens + output_tokens / 2
        for num in _BATCHES:
            if num > self._max_num_seqs:
                continue
            step_s = self.times.decode_s(num, context)
            if num == 1 or self._slo.tpot_s is None or step_s <= self._slo.tpot_s:
                return output_tokens * step_s / num
        raise AssertionError("one stream always counts")

    def token_s(self, num_streams: float, context: float) -> float:
        return self.times.decode_s(max(1, round(num_streams)), max(1.0, context))
