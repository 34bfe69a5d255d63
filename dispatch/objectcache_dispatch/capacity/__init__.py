"""What a cluster can carry: how busy every link is, and which P/D ratios fit."""
