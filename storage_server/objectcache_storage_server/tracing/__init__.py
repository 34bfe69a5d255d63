"""Where a delivery's time went (paper, section 4.4): what is recorded, kept and exported.

Read in this order: `recorder` (one delivery), `trace_book` (the last of them), `export` (to
OpenTelemetry, where that is asked for).
"""
