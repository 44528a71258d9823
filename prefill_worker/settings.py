"""A prefill worker reads prompts and hands their KV over. It has no defaults of its own yet: on a CPU one chunk size
suits both roles."""

from baton.worker.main import Role

ROLE = Role("prefill", "Reads prompts and hands their KV to decode workers.")
