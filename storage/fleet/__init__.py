"""What a fleet is made of: nodes, jobs, leases, its requests and their log, and API keys."""
