"""The lifecycle of a tuning: the request, what is known of it, the pure choice of its next step, and the answer."""
