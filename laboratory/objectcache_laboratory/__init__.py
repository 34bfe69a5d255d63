"""Programs that try the store out: a small engine, the demo, replays and calibration."""
