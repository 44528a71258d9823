"""Move KV blocks across processes and machines: named, described, leased, pulled and verified."""
