"""HTTP to the gateway: requests, answers, signatures, connections."""
