"""The session with one worker: commands out, events of each key in, tokens in batches."""
