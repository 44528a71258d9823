"""One attempt of a request on workers: find workers, hold legs on them, pull prefixes, attach to running sequences, and
bound timeouts, failures and retries."""
