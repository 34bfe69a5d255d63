"""Deliveries whose payload leaves through a socket: the gateway's, or the client's own."""

from __future__ import annotations

import asyncio
import logging
import os
import socket as sockets
import time
from contextlib import ExitStack

from objectcache_runtime.first_of import end, first_done
from objectcache_runtime.networking.stream_socket import StreamSocket
from objectcache_schemas.conversations import BodyChoice
from objectcache_schemas.errors import Busy, DeliveryFailed, InvalidRequest
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.reads import BodySent, SendBody
from objectcache_storage_server.admission.gates import BodyMemory
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.deliveries.get_means import GetMeans
from objectcache_storage_server.deliveries.plan import Plan
from objectcache_storage_server.deliveries.running_delivery import (
    BodyDelivery,
    DeliveryTerms,
    RunningDelivery,
    accepted,
    wait_admitted,
)
from objectcache_storage_server.engines.base import OpenObjects
from objectcache_storage_server.transports.body import BodyTransport

logger = logging.getLogger("objectcache.storage_server.gets")


async def receive_choice(talk: Conversation, memory: BodyMemory) -> BodyChoice:
    """What the gateway wants of the body, once its client has taken the head of the response.
    Raises `Busy` where that is too slow while others wait.
    """
    try:
        return await memory.pace.wait_for(talk.receive_body_choice())
    except Busy:
        talk.give_up()  # the choice is still to come
        raise


def start_body(
    means: GetMeans, plan: Plan, opened: OpenObjects, terms: DeliveryTerms, memory: BodyMemory
) -> BodyDelivery:
    """Begin reading into buffers; at most what is reserved runs ahead of the client.

    Takes `opened` and the memory over, whether it succeeds or not.
    """
    with ExitStack() as undo:
        undo.callback(opened.close)
        undo.callback(memory.release)
        transport = BodyTransport(
            means.gates.pool,
            memory.reserved,
            memory.pace,
            lambda: means.schedule.dispatcher.wake(running.delivery),
            terms.recorder,
        )
        running = RunningDelivery(means, plan, opened, transport, terms)
        undo.pop_all()  # from here on the delivery lets them go
    try:
        running.start()
    except BaseException:
        memory.unwatch()
        running.after_end(transport.release)
        raise
    return BodyDelivery(running, transport, plan.payload_bytes, memory)


async def serve_body(means: GetMeans, talk: Conversation, body: BodyDelivery) -> None:
    """Say that it was accepted, and send it where the gateway chooses."""
    try:
        await wait_admitted(means, talk, body.running)
        await talk.send(accepted(body.running))
        choice = await receive_choice(talk, body.memory)
    except BaseException:
        await body.close("the gateway is gone")
        raise
    if not isinstance(choice, SendBody):
        await body.close("the gateway took no body")
        await talk.send(Done())
        return
    await send_body(means, talk, body, choice)


async def send_body(
    means: GetMeans, talk: Conversation, body: BodyDelivery, choice: SendBody
) -> None:
    """Send the payload where `choice` says, until it is through or somebody is gone."""
    descriptor = talk.take_descriptor()
    if not choice.into_socket:
        if descriptor is not None:
            os.close(descriptor)
        await _send_watched(means, talk, body, talk.stream)
        return
    try:
        client = _client_socket(descriptor)
    except BaseException:
        await body.close("no socket came with SendBody")
        raise
    try:
        await _send_watched(means, talk, body, client)
    finally:
        client.close()
    if not talk.given_up:
        await talk.send(BodySent(length_bytes=body.payload_bytes))


def _client_socket(descriptor: int | None) -> StreamSocket:
    """The socket that was passed. Raises `InvalidRequest` where it is none, and closes it."""
    if descriptor is None:
        raise InvalidRequest("SendBody with into_socket needs a socket beside it")
    try:
        passed = sockets.socket(fileno=descriptor)
    except OSError as error:
        os.close(descriptor)
        raise InvalidRequest(
            f"what came beside SendBody is no socket: {error.strerror}; pass a connected stream "
            "socket"
        ) from error
    if passed.type != sockets.SOCK_STREAM:
        passed.close()
        raise InvalidRequest("the socket beside SendBody is no stream; pass a connected one")
    return StreamSocket(passed)


async def _send_watched(
    means: GetMeans, talk: Conversation, body: BodyDelivery, stream: StreamSocket
) -> None:
    """Send, and stop when the gateway hangs up. A body that cannot be completed is cut.

    Only a stall ends a body that its client still takes, however long it takes.
    """
    storage = means.settings.storage
    sending = asyncio.ensure_future(
        body.transport.send(stream, body.payload_bytes, storage.send_stall_timeout_s)
    )
    watching = asyncio.ensure_future(talk.stream.closed_by_peer())
    why = "the gateway is gone"
    try:
        await first_done(sending, watching)
        if sending.done():
            error = sending.exception()
            if error is None:
                return
            why = str(error)
    finally:
        try:
            await end(sending, watching)
        finally:
            await body.close(why)
    logger.info("delivery %s was cut: %s", body.running.delivery.name, why)
    body.running.terms.recorder.ended(time.monotonic(), DeliveryFailed(why).to_wire())
    talk.give_up()
