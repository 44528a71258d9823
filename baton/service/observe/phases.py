"""The phases of a request up to its second message, in order: the fields of Timing without `_s`. They follow one
another without a gap. The page and the report draw each phase in its colour."""

PHASES = (
    "tokenize", "route", "admit", "prefill_queue", "prefill", "first_delivery", "kv_wait", "decode_queue", "first_step",
    "second_delivery",
)  # fmt: skip

DECODE = "decode"
"""All that comes after the second message."""

COLORS: dict[str, str] = dict(
    zip(
        (*PHASES, DECODE),
        (
            "#94a3b8",
            "#cbd5e1",
            "#f59e0b",
            "#fbbf24",
            "#2563eb",
            "#93c5fd",
            "#dc2626",
            "#fb923c",
            "#059669",
            "#6ee7b7",
            "#a7f3d0",
        ),
        strict=True,
    )
)
