"""A typed client of the HTTP API. `Client(url, api_key)`; every answer is plain data in the shapes of /openapi.json."""

from autotune.client.client import Client

__all__ = ["Client"]
