"""Verbs: one queue pair a session, writes from staging memory, announcements as immediate data."""
