"""One module a client. Each imports the standard library, `driver`, and its own client alone."""
