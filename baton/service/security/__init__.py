"""Who may call what: certificates by role, credentials, call slots, and what is open beyond this host."""
