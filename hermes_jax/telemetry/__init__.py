"""Metrics, progress, episode log, report."""
