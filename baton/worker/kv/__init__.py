"""Move KV in and out: intake for a taker, handoff for a source, conversions and digests."""
