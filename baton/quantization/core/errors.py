"""The errors of quantizing and scoring."""


class QuantizeError(Exception):
    """Wrong input or use; one line that names the thing and says what to do."""
