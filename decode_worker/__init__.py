"""The decode role: grant credit, adopt a prompt's KV or read it here, stream tokens, park sequences that are not
read."""
