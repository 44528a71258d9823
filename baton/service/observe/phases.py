"""The phases of a request up to its second message, in order: fields of Timing without their `_s`. They follow each
other without a gap."""

PHASES = (
    "tokenize", "route", "admit", "prefill_queue", "prefill", "first_delivery", "kv_wait", "decode_queue", "first_step",
    "second_delivery",
)  # fmt: skip
