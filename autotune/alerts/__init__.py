"""Alerts: incidents told to a webhook and by e-mail, each once, whatever fails on the way."""
