"""The name of the role, and its defaults on a GPU."""

from baton.worker.main import Role

ROLE = Role(
    "decode",
    "Takes prompts' KV over and writes the answers.",
    # Weights are read once a step, for one sequence or for 256. Chunks of prompts that are read here stay shorter than
    # a prefill worker's, since decoding waits for them. Not measured on a GPU.
    {"max_num_seqs": 256, "max_num_batched_tokens": 2048},
)
