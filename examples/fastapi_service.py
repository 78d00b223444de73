"""A FastAPI service that answers an order when it is safe: one producer for all requests.

`RAFTMQ=host:port uvicorn --app-dir examples fastapi_service:app`, then
`curl -H 'content-type: application/json' -d '{"customer": "ann"}' localhost:8000/orders`.

The producer begins with the service and ends with it (`lifespan`); requests share it, and it
gathers what they send into batches. 201 says that a majority of the replicas has the order on disk,
503 with `"outcome": "failed"` that it is certainly not stored, with `"unknown"` that it may be. On
SIGTERM uvicorn lets requests end, and leaving the lifespan sends what is still on its way. Were
there failed records whose outcome nobody awaited, it would raise an `UndeliveredError`.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from raftmq_client import ClientError
from raftmq_client.aio import Producer


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The producer lives as long as the service."""
    async with Producer(
        os.environ.get("RAFTMQ", "127.0.0.1:9092"),
        key_serializer="str",
        value_serializer="json",
        delivery="at_least_once",
        delivery_timeout_ms=10_000,
    ) as producer:
        app.state.producer = producer
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def take_order(order: dict[str, Any], request: Request) -> Any:
    """Store one order."""
    producer: Producer = request.app.state.producer
    try:
        receipt = await producer.send("orders", order, key=str(order.get("customer", "")))
        place = await receipt
    except ClientError as error:
        return JSONResponse({"error": str(error), "outcome": error.outcome.value}, 503)
    return {"partition": place.partition, "offset": place.offset}
