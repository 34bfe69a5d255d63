"""Figures 7 to 13 and Tables 1 to 3 of DualPath (arXiv:2602.21548), simulated."""
