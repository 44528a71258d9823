"""KV on its way in and out: intake of a taker, handoff of a source, conversions and digests."""
