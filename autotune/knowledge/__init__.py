"""Best-known plans: recorded when a tuning ends, asked for by anybody, carried over to questions nearby."""
