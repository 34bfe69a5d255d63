"""What was put becomes durable and visible."""
