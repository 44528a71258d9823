"""Summands of ranks whose order of adding shows."""

import torch

SIZE = 48


def parts_of(degree: int, num_rows: int, dtype=torch.float32) -> list[torch.Tensor]:
    """Of magnitudes so unlike that the order of a sum shows."""
    generator = torch.Generator().manual_seed(degree * 100 + num_rows)
    rows = torch.randn(degree, num_rows, SIZE, generator=generator)
    return list((rows * 10.0 ** torch.randint(-3, 4, rows.shape, generator=generator)).to(dtype))
