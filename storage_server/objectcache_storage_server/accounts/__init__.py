"""Users, access keys, grants, tokens, and what they may use: kept, told to gateways, counted."""
