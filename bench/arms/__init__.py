"""What benches compare: engines of ours, peers, simulated fleets."""
