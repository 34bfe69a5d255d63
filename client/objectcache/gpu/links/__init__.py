"""Copies over several links at once, off unless asked for, and not yet run on a GPU.

Read `micro_tasks`, `pull_settings` and `link_pulls`, which are pure, then `linked_copies`;
`linked_device` lets a copier's line have them, `checked_links` says which are fit for it.
"""
