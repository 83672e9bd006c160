"""Running the user's own training program under a plan, reading its steps, and ending it. Loads no torch."""
