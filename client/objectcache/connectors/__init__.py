"""Connectors for inference engines, a folder each, which imports its engine only where it is used.

`store` has what every connector is told of its bucket and asks of it, `identity` names what is
stored, `timing` learns how long an engine computes. Of the modules beside the folders,
`missing_engine` serves all, and the others are names that users configure.
"""
