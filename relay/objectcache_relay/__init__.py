"""The relay: takes deliveries in over this node's storage NIC and sends them on to engines."""
