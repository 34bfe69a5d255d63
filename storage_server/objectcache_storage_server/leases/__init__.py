"""Targets that are lent to a gateway, which stages a payload and writes it (paper, section 4.1)."""
