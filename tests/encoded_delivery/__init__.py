"""Deliveries of frames as they are stored, from real servers, by every transport that runs here."""
