"""Calibrated methods: AWQ, GPTQ, SmoothQuant, outliers."""
