"""ObjectCache's client."""
