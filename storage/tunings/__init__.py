"""What tunings are made of: models, clusters, requests, trials, probe runs and profiles."""
