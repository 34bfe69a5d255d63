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
CONTENT = "x-objectcache-content"  # of a get: a digest of its objects' ETags
DIRECTORY_BYTES = "x-objectcache-directory-bytes"  # before the layers of an encoded payload
DEQUANTISE = "x-objectcache-dequantise"  # of a get through a fetcher: the lossy dtype and shape
HOST_ID = "x-objectcache-host-id"  # of a client that asks for a ticket: the boot id of its host
SERVER_ID = "x-objectcache-server-id"  # of the storage server that a session is wanted with, hex
RELAYED_BY = "x-objectcache-relayed-by"  # of what a relay asks upstream: which relay it is
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
KV_SERVERS = "kv-servers"

# Of the WebSocket that a session is joined over
SESSION_PROTOCOL = "objectcache-session-1"

MSGPACK = "application/msgpack"
