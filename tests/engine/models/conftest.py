"""What tests of tiny models share."""

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """Matrices this small only wait for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
