"""The server's sockets and what is said over them."""
