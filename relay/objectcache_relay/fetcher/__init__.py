"""The fetcher: takes layers in for the engines of its own host, and decodes them into their memory
by processes of its own. It is a relay with workers.
"""
