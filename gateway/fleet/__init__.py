"""The workers of this gateway: which of them serve which model, and which of them routing may choose from."""
