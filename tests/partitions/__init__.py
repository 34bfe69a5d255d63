"""Storage servers whose network is cut: silence, and not a refusal."""
