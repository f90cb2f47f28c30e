"""Tools, toolsets, sandboxes and the worker server that runs them."""
