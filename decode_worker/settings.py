"""A decode worker takes prompts' KV over and writes the answers. It has no defaults of its own yet."""

from baton.worker.main import Role

ROLE = Role("decode", "Takes prompts' KV over and writes the answers.")
