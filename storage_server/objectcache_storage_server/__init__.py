"""The storage server: engines, plans, deliveries and the transports that carry them."""
