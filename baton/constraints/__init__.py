"""Constraints on answers: checked within bounds, compiled to a grammar, followed token by token."""
