"""Memory that layers land in: who may write to it, and when it may be used again."""
