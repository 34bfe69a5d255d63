"""How much tenants and buckets may have, and have: stored, in flight, and in requests a second."""
