"""Constraints on answers, without an engine."""
