"""One layer to quantize: its stages, grids of values, and scales folded from one weight into another."""
