"""Guess the next tokens: prompt lookup, a draft model, Medusa and EAGLE heads, a layer that the checkpoint ships. Read proposer first."""
