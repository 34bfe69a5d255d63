"""Who may begin, and with how much memory: every gate that a get or a put passes."""
