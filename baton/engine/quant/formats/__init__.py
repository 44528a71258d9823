"""How published checkpoints store weights. Each format reads its own into the forms of quant/weights.py."""
