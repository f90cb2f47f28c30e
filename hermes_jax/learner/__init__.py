"""Train state, update step, optimizer, mesh and sharding rules, checkpoint."""
