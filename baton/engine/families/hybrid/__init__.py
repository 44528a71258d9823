"""Families with layers that keep a state of fixed size, alone or among layers of attention."""
