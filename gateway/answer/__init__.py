"""The answer of one request: token ids become the text, choices and messages that its client receives."""
