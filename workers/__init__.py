"""The nerves of the service: the processes of a fleet that measure, decide and keep time."""
