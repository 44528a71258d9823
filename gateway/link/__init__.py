"""The session with one worker: commands go out, events of each leg come in, tokens come in batches."""
