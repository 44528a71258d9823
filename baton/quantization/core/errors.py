"""The errors of quantizing and scoring."""


class QuantizeError(Exception):
    """Wrong input or wrong use; one line that names the thing and says what to do."""
