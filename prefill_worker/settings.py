"""The name of the role. It has no defaults of its own: on a CPU one chunk size suits both roles."""

from baton.worker.main import Role

ROLE = Role("prefill", "Reads prompts and hands their KV to decode workers.")
