"""Code generated from protos/baton/v1; never edited."""
