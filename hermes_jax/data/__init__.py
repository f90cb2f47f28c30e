"""Trajectories, episodes, groups, packing, prompt sources."""
