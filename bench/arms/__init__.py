"""Arms that benches compare: engines of ours, peers, simulated fleets."""
