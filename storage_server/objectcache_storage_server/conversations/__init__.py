"""With whom the server talks: gateways, a request at a time, and clients' sessions."""
