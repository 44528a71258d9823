"""Train Medusa and EAGLE heads against a frozen target."""
