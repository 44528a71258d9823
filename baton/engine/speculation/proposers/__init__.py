"""Guess the next tokens: prompt lookup, a draft model, Medusa and EAGLE heads. Read proposer first."""
