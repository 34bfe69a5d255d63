"""Many storage servers and engines, simulated under virtual time with the project's own rules."""
