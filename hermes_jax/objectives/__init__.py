"""Pure functions over arrays: advantages (host), policy losses, KL, importance correction, aggregation."""
