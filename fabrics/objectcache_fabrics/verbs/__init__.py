"""Verbs: devices and queue pairs, the side that registers (`endpoint`) and the one that writes."""
