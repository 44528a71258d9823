"""Installations of certificates and keys, and all methods that our ports serve."""
