"""The pool of KV blocks: who holds which, stored forms, the local prefix cache."""
