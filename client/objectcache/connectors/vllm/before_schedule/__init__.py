"""Loads that end before their requests are scheduled: the engine parks a request until its KV is in
its blocks, so that no step can compute on what is not there.
"""
