"""How a fetch chooses where its bytes come, and becomes a running delivery."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from objectcache.core import ClientCore, TransportChoice
from objectcache.deliveries.begun_fetch import BODY, BegunFetch
from objectcache.deliveries.delivery import Delivery
from objectcache.deliveries.encoded.automatic import choose
from objectcache.deliveries.encoded.delivery_watch import DeliveryWatch
from objectcache.deliveries.encoded.layer_views import (
    LayerViews,
    PlainLayers,
    WireLayers,
    copied_layers,
    decoded_layers,
    dequantised_layers,
    dequantised_shape,
)
from objectcache.deliveries.encoded.look_again import have_looked_at
from objectcache.deliveries.fetch_into_body import begin_in_body
from objectcache.deliveries.fetch_into_target import begin_into_target
from objectcache.deliveries.fetch_request import FetchRequest
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.split.routed_fetch import begin_routed
from objectcache.deliveries.split.split_fetch import begin_split, divisible
from objectcache.landing.refusals import is_going, may_fall_back
from objectcache.landing.regions import Landing
from objectcache.payload import PayloadShape
from objectcache.routes.client_routes import UNDIVIDED, ClientRoutes, RoutePlan
from objectcache.routes.route_settings import FETCHER, AskedRoute
from objectcache.routes.taken_route import TakenRoute
from objectcache_schemas.descriptor import DeliveryMode
from objectcache_schemas.errors import InvalidRequest, NotFound, Unavailable

T = TypeVar("T")
UNKNOWN_ENCODINGS = "unknown field `encodings`"  # in the refusal of a server from before them
UNKNOWN_S = 600.0  # for which it is not asked again: it may be replaced by a later one


def fetch(
    core: ClientCore,
    request: FetchRequest,
    routes: ClientRoutes | None = None,
    route: AskedRoute | None = None,
) -> Delivery:
    """Begin a delivery; returns when the server has accepted it, or a relay.

    Raises the server's refusal, or `Unavailable` with the reason where registered memory was
    demanded and cannot be had.
    """
    decoded: Landing | None = None  # where layers are made of what lands elsewhere
    watch: DeliveryWatch | None = None
    if request.chooses_encodings:
        request, watch = choose(core, request)
    asked = request
    if request.decodes_elsewhere:
        assert request.target is not None
        decoded = request.target.claim(request.timeout_s)
        asked = request.into_own_memory()
    try:
        begun = _begin(core, asked) if routes is None else _begin_on(core, routes, asked, route)
    except BaseException:
        if decoded is not None:
            decoded.settle()
        raise
    shape = begun.head.shape(request.descriptor)
    delivery = Delivery(
        begun.progress,
        shape if request.lossy is None else dequantised_shape(shape, request.lossy),
        begun.landing.array,
        begun.receiver,
        transport=begun.transport,
        head=begun.head,
        target=asked.target,
        reports=begun.reports,
        owner=(core, routes),
        route=begun.route,
        layers=_layers(core, request, begun, decoded),
        watch=watch,
    )
    begun.receiver.start(core.threads)
    return delivery


def _layers(
    core: ClientCore, request: FetchRequest, begun: BegunFetch, target: Landing | None
) -> LayerViews:
    shape, memory = begun.head.shape(request.descriptor), begun.landing.array
    keys = request.descriptor.chunk_keys
    stored_bytes = shape.payload_bytes

    def damaged(layer: int, key: str) -> None:
        core.threads.start(partial(have_looked_at, core, request, layer, key))

    if request.lossy is not None and begun.is_dequantised:
        shape = dequantised_shape(shape, request.lossy)
    elif request.lossy is not None:
        return dequantised_layers(begun.wire, memory, shape, target, keys, request.lossy, damaged)
    if begun.wire is None:
        plain = PlainLayers(shape, memory, stored_bytes)
        return plain if target is None else copied_layers(memory, shape, target, stored_bytes)
    if not request.decodes:
        return WireLayers(begun.wire)
    return decoded_layers(begun.wire, shape, target, keys, damaged)


def _begin_on(
    core: ClientCore, routes: ClientRoutes, request: FetchRequest, route: AskedRoute | None
) -> BegunFetch:
    divided: FetchRequest | None = None
    if routes.is_split(route):
        divided = divisible(core, request)
    asked = (divided or request).descriptor
    plan = routes.plan(route, asked, divides=divided is not None)
    if plan.is_direct:
        return _begin_directly(core, request, plan)
    encodings = request.descriptor.encodings

    def without_fetcher(core: ClientCore, stored: FetchRequest) -> Delivery:
        descriptor = replace(stored.descriptor, encodings=encodings)
        return fetch(core, replace(stored, descriptor=descriptor))

    request, divided = request.without_encodings(), divided and divided.without_encodings()
    if divided is None or divided == request:
        away = replace(request, is_dequantised_away=_may_be_dequantised(request, plan))
        return begin_routed(core, routes, away, plan, without_fetcher)
    try:
        return begin_routed(core, routes, divided, plan, without_fetcher)
    except NotFound as error:
        if error.code != "NoSuchKey":
            raise
    begun = _begin(core, request)  # evicted since it was looked for
    return replace(begun, route=TakenRoute("direct", UNDIVIDED))


def _may_be_dequantised(request: FetchRequest, plan: RoutePlan) -> bool:
    """Whether a fetcher is asked to dequantise: all of it, layer by layer, over a session."""
    return (
        request.lossy is not None
        and [relay.address.node for relay in plan.relays] == [FETCHER]
        and len(plan.parts) == 1
        and request.descriptor.delivery is DeliveryMode.LAYERWISE
        and not request.comes_in_body
    )


def _begin_directly(core: ClientCore, request: FetchRequest, plan: RoutePlan) -> BegunFetch:
    (part,) = plan.parts
    try:
        begun = _begin(core, request)
    except BaseException:
        plan.end()
        raise
    progress = begun.progress
    slice_bytes = request.descriptor.per_layer_chunk_bytes

    def heard() -> None:
        layer_bytes = begun.layer_bytes(slice_bytes)
        part.assignment.heard(progress, layer_bytes, is_at_full_rate=True)

    progress.listen(heard)
    heard()
    plan.follow(progress)
    return replace(begun, route=TakenRoute("direct", plan.reason))


def _begin(core: ClientCore, request: FetchRequest) -> BegunFetch:
    return begin_with_known_encodings(core, request, _begin_as_asked)


def begin_with_known_encodings(
    core: ClientCore, request: FetchRequest, begin: Callable[[ClientCore, FetchRequest], T]
) -> T:
    """Once more without encodings where the server is of a release that does not know the field."""
    if not request.descriptor.encodings:
        return begin(core, request)
    if core.server_knows_encodings(time.monotonic()):
        try:
            return begin(core, request)
        except InvalidRequest as error:
            if UNKNOWN_ENCODINGS not in error.message:
                raise
        core.encodings_unknown_until_s = time.monotonic() + UNKNOWN_S
    return begin(core, request.without_encodings())


def _begin_as_asked(core: ClientCore, request: FetchRequest) -> BegunFetch:
    if request.comes_in_body:
        return begin_in_body(core, request)
    try:
        return begin_in_memory(core, request)
    except (Unavailable, NotFound) as error:
        if request.memory_choice is not TransportChoice.AUTO or not may_fall_back(error):
            raise
    return begin_in_body(core, request)


def begin_in_memory(core: ClientCore, request: FetchRequest) -> BegunFetch:
    """Into registered memory: once more over a new session, which may be another server's, where
    the server goes.
    """
    memory = core.memory(request.memory_choice)
    split = begin_split(core, request.without_encodings(), memory)
    if split is not None:
        return split
    try:
        return begin_into_target(core, request, memory)
    except Unavailable as error:
        if not is_going(error):
            raise
    return begin_into_target(core, request, memory)


def empty_delivery(layers: tuple[int, int], slice_bytes: int) -> Delivery:
    """The delivery of no chunks: complete, without asking a server."""
    first_layer, end_layer = layers
    progress = LayerProgress(first_layer, end_layer)
    progress.advance(end_layer)
    shape = PayloadShape(first_layer, end_layer, 0, slice_bytes, DeliveryMode.LAYERWISE)
    return Delivery(progress, shape, np.empty(0, np.uint8), None, transport=BODY)
