"""The engine over a store that several storage servers share."""
