"""Arms that benches compare: engines of ours, and peers."""
