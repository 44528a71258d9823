"""The fuzzers that there are, by the kind that their plans name."""

import tempfile
from collections import Counter
from pathlib import Path

from tests.support.fuzz.fuzzer import Fuzzer
from tests.support.fuzz.plans import real_plan, toy_plan
from tests.support.fuzz.real import Real
from tests.support.fuzz.shrink import Plan
from tests.support.fuzz.stacks import Stacks, stack_plan
from tests.support.fuzz.toy import Toy
from tests.support.fuzz.two_engines import TwoEngines
from tests.support.models import make_model


def _on_a_stack(plan: Plan) -> Counter[str]:
    """Obey a plan on a stack of its own."""
    with tempfile.TemporaryDirectory() as folder:
        with Stacks(make_model(Path(folder) / "tiny"), Path(folder) / "stack") as stacks:
            return stacks.obey(plan)


ALL = {
    "toy": Fuzzer("toy", toy_plan, lambda plan: TwoEngines(plan, Toy()).run()),
    "real": Fuzzer("real", real_plan, lambda plan: TwoEngines(plan, Real()).run()),
    "stack": Fuzzer("stack", stack_plan, _on_a_stack),
}
