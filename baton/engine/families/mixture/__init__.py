"""Families with a mixture of experts in place of the MLP of some or all layers."""
