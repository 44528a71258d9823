"""Measure Baton: each file is a bench, run as `python -m bench.NAME` or `python bench/NAME.py`."""
