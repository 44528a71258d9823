"""Convert between the engine's outputs and the session's messages: codec, outbox, end status, thread bridge."""
