"""Regression: whether best-known plans still hold, and if not, whose fault it is."""
