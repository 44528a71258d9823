"""The pool of KV blocks: holders, stored forms, the local prefix cache."""
