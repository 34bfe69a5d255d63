"""Copies to GPUs: over the links of a machine in virtual time, and tried on those that are here.

Read `machine`, then `figures`, which has MMA's beside each; `check` and `line_trials` are apart.
"""
