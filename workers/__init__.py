"""The nerves of the service: Celery workers on GPU nodes, their registry and leases. Nothing runs through them yet."""
