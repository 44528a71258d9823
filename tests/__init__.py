"""Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is first imported."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
