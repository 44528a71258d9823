"""Convert KV from one stored form to another between two workers, with the engine's own encodings."""

import numpy as np
import torch

from baton.engine.kv.stored_forms import decode, encode


def convert_rows(
    rows: np.ndarray, scales: np.ndarray, source_form: str, taker_form: str
) -> tuple[np.ndarray, np.ndarray]:
    """Convert rows uint8 [n, row bytes] and scales uint8 [n, scale bytes, may be 0] from `source_form` to `taker_form`,
    bit for bit as the taker's engine would store the same values. Raises ValueError for an unknown form."""
    with torch.inference_mode():
        values = decode(source_form, torch.from_numpy(rows), torch.from_numpy(scales), torch.float32)
        encoded = encode(taker_form, values)
    return encoded[0].numpy(), encoded[1].numpy()
