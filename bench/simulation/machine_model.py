"""The scaler's load model for workers of the simulated fleet."""

from baton.service.slo import Slo
from bench.simulation.fleet import Machine


class MachineModel:
    """The load model of a Machine, for the scaler."""

    def __init__(self, machine: Machine, slo: Slo):
        self._machine = machine
        step_s, each_s = machine.step_s, machine.sequence_s
        most = machine.max_sequences if slo.tpot_s is None else int((slo.tpot_s - step_s) / each_s)
        self._num = max(1, min(most, machine.max_sequences))

    def read_s(self, prompt_tokens: float) -> float:
        return self._machine.prompt_s + prompt_tokens * self._machine.token_s

    def write_s(self, prompt_tokens: float, output_tokens: float) -> float:
        return output_tokens * self.token_s(self._num, prompt_tokens) / self._num

    def token_s(self, num_streams: float, context: float) -> float:
        return self._machine.step_s + self._machine.sequence_s * num_streams
