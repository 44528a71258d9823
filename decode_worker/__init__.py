"""The decode role: grant credit, adopt a prompt's KV or read the prompt here, stream tokens, park sequences that nobody
reads."""
