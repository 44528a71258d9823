"""Quantized folders and files in the formats that others write, read as the forms of weights/forms."""
