"""Convert KV from one stored form to another on its way between two workers, by the engine's own encodings."""

import numpy as np
import torch

from baton.engine.kv.stored_forms import decode, encode


def convert_rows(
    rows: np.ndarray, scales: np.ndarray, source_form: str, taker_form: str
) -> tuple[np.ndarray, np.ndarray]:
    """Convert rows uint8 [n, row bytes] with their scales uint8 [n, scale bytes, perhaps 0] in `source_form`, as
    `taker_form` keeps them: bit for bit what the taker's engine would store of the same values. Raises ValueError for
    an unknown form."""
    with torch.inference_mode():
        values = decode(source_form, torch.from_numpy(rows), torch.from_numpy(scales), torch.float32)
        encoded = encode(taker_form, values)
    return encoded[0].numpy(), encoded[1].numpy()
