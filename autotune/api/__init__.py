"""The HTTP API. `application.create_app` makes the app, `server.serve` runs it; importing this loads nothing."""
