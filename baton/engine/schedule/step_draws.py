"""The tokens that a step has drawn."""

from baton.engine.sampling.sampler import Sampled
from baton.engine.schedule.sequence import Sequence

Drawn = tuple[Sequence, list[Sampled]]  # at the end of a prompt a token for each choice, then those it continues with
