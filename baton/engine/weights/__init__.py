"""The forms that a weight can have. Read forms.py first."""
