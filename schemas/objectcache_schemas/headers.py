"""Names of the HTTP headers and query keys that the extension adds to S3."""

DESCRIPTOR = "x-objectcache-descriptor"
DELIVERY = "x-objectcache-delivery"
CHUNK_COUNT = "x-objectcache-chunk-count"
LAYER_BYTES = "x-objectcache-layer-bytes"
REQUEST_ID = "x-objectcache-request-id"
RATE = "x-objectcache-rate"
PATH = "x-objectcache-path"
TRANSPORT = "x-objectcache-transport"
WINDOW_SOURCE = "x-objectcache-window-source"
CLIENT_SECONDS = "x-objectcache-client-seconds"
ADMIN_API = "x-objectcache-admin-api"  # on every answer of the admin API, to tell it from S3
TRACEPARENT = "traceparent"  # W3C Trace Context
# Every header that begins so must be signed, because it may change what is served; but for labels,
# which only name a request, or say how long ago it began.
PREFIX = "x-objectcache-"
UNSIGNED_LABELS = frozenset({REQUEST_ID, CLIENT_SECONDS})

KV_GET = "kv-get"
KV_MATCH = "kv-match"
KV_PUT = "kv-put"
KV_LAYOUT = "kv-layout"
KV_SESSION = "kv-session"

# Of the WebSocket that a session is joined over
SESSION_PROTOCOL = "objectcache-session-1"

MSGPACK = "application/msgpack"
