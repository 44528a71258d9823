"""Faults on purpose. docs/faults.md#how says what I-1 to I-9 are, which are checked after each case, and
docs/faults.md#where-which-case-is what the letters of cases are."""
