"""The session with one worker: commands out, events of each leg in, tokens in batches."""
