"""Families of models: how each reads its config.json into a spec of layers; models/registry.py has the table."""
