"""How a process is reached: addresses, listening sockets, TLS."""
