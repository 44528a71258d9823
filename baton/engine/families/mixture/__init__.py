"""Families with a mixture of experts instead of the MLP of some or all layers."""
