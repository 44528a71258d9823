"""The name of the role, and its defaults on a GPU."""

from baton.worker.main import Role

ROLE = Role(
    "prefill",
    "Reads prompts and hands their KV to decode workers.",
    # A chunk reads the weights once, which takes an H100 as long as computing 300 tokens (989 TFLOP/s over 3.35 TB/s).
    # Not measured on a GPU.
    {"max_num_batched_tokens": 8192},
)
