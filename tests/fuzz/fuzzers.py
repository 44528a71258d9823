"""The fuzzers that there are, by the kind that their plans name."""

from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.plans import real_plan, toy_plan
from tests.fuzz.real import Real
from tests.fuzz.toy import Toy
from tests.fuzz.world import World

ALL = {
    "toy": Fuzzer("toy", toy_plan, lambda plan: World(plan, Toy()).run()),
    "real": Fuzzer("real", real_plan, lambda plan: World(plan, Real()).run()),
}
