"""The name of the role, and its defaults on a GPU."""

from baton.worker.main import Role

ROLE = Role(
    "decode",
    "Takes prompts' KV over and writes the answers.",
    # A step reads the weights once, for one sequence or for 256. Chunks of prompts are shorter than a prefill worker's,
    # since decoding waits for them. Not measured on a GPU.
    {"max_num_seqs": 256, "max_num_batched_tokens": 2048},
)
