"""The brain of the fleet: who measures what and when, what a failure means, and how a tuning goes on. No SQL, no queue
library: it works over the ports of autotune.ports.fleet.
"""
