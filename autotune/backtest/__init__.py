"""Backtest: replays published or own runs, so that a search may only learn a run's result by asking for it."""
