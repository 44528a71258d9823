"""Ranks of a worker on other hosts: where they join, over gRPC, and the program that runs there."""
