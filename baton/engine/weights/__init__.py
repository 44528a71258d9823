"""The forms that a weight can have; read forms first."""
