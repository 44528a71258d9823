"""Compute a step: build the engine, pack inputs, launch (as a CUDA graph where there is one), run, collect."""
