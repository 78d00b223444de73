"""Where requests die: each handler turns one API's structs into calls of the cluster's words.

A handler is `handle(broker, context, request)` and returns its answer or a promise of it. It never
waits, and never touches a socket.
"""
