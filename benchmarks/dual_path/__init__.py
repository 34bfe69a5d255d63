"""Deliveries over other nodes' storage links, with real bytes: network namespaces whose links the
kernel bounds, real servers and relays, and the reference engine computing.
"""
