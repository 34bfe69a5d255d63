"""Names of the HTTP headers and query keys that the extension adds to S3."""

DESCRIPTOR = "x-objectcache-descriptor"
DELIVERY = "x-objectcache-delivery"
CHUNK_COUNT = "x-objectcache-chunk-count"
LAYER_BYTES = "x-objectcache-layer-bytes"
REQUEST_ID = "x-objectcache-request-id"
RATE = "x-objectcache-rate"

KV_GET = "kv-get"
KV_MATCH = "kv-match"
KV_PUT = "kv-put"
KV_LAYOUT = "kv-layout"
KV_SESSION = "kv-session"

MSGPACK = "application/msgpack"
