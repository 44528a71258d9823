"""Guess the next tokens: lookup in prompts and earlier answers, a draft model, Medusa and EAGLE heads, a layer that the
checkpoint ships. Read proposer first."""
