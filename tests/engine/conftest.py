"""What all tests of the engine share."""

from importlib.util import find_spec

import pytest

from baton.engine import kernels
from tests.support.native import interpreter


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter():
    """`combine` reads 16 splits at a time, so that none waits for another's memory. The interpreter walks all of them,
    where most steps of these tests have two: that was half of its time."""
    if not kernels.INTERPRETED or find_spec("triton") is None:
        yield
        return
    from baton.engine.kernels import paged_attention

    with pytest.MonkeyPatch.context() as patch:
        interpreter.do_once(patch.setattr)
        patch.setattr(paged_attention, "GROUP_LOADS", paged_attention.tl.constexpr(2))
        yield
