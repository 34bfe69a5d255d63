"""The extension: KV prefixes, layouts and sessions."""
