"""The ways out of a relay: into an engine's memory, or in a body."""
