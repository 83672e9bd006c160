"""The lifecycle of a tuning: pure states, the service that advances them, and the ports it talks through."""
