"""The HTTP port for administrators: pages, and the few requests that change something.

Kafka's admin APIs come to the other port: `server/kafka/handlers/`.
"""
