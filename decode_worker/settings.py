"""The name of the role. It has no defaults of its own."""

from baton.worker.main import Role

ROLE = Role("decode", "Takes prompts' KV over and writes the answers.")
