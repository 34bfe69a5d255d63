"""Over which nodes' storage NICs deliveries come: directly, or over relays."""
