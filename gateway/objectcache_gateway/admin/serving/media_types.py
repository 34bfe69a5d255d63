"""What answers of the admin server and to it are written in."""

TEXT, NDJSON, JSON = "text/plain", "application/x-ndjson", "application/json"
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
