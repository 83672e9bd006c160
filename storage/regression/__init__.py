"""What regression checks leave: checks with their measurements, incidents, alerts."""
