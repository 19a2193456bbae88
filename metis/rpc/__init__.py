"""gRPC over HTTP/2 on Trio, under grpclib's own upper half.

In the order in which bytes travel: `transport` (and `memory`) make streams and
listeners, `connection` turns bytes into events and back (pure, over h2),
`session` drives one connection on Trio, `server` runs the handlers and
`channel` serves the stubs. `codec` turns messages into bytes, `limits` holds
every bound. Nothing here knows what is being called.
"""
