"""The plan space, its ranking by estimate, and the search over it."""
