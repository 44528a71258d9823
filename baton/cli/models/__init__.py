"""Commands that make and measure models: quantize, eval, train-demo, train-draft."""
