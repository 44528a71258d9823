"""Inference on one device: models, paged KV, continuous batching, sampling and speculation."""
