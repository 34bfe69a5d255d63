"""Connectors for inference engines. Each imports its engine only where it is used.

`configuration` reads what every connector is told, `namespace` names what it stores; the modules
named after an engine are what that engine loads.
"""
