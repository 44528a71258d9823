"""Read quantized folders and files in the formats of other projects as the forms of weights/forms.py."""
