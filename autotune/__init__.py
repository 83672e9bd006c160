"""The brain of autotune: specs, cost model, search and the lifecycle of a tuning. No torch, no database."""
