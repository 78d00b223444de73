"""The port for Kafka clients: sockets, frames, ordered replies, limits, handlers.

Nothing here decides what is stored or who leads; it turns bytes into calls of the layers below and
their answers, some of them later, into bytes.
"""
