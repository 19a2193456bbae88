"""gRPC over HTTP/2 on Trio, under grpclib's own upper half.

In the order in which bytes travel: `transport` (with `memory`) makes streams and
listeners; `connection` (with `http2` and `headers`) turns bytes into events and
back, pure, over h2; `session` drives one connection on Trio and `stream` is one
call on it; `server` and `call` run the handlers, `channel` and `client_stream`
serve the stubs. `codec` and `wire` turn messages into bytes, `limits` holds
every bound. Nothing here knows what is being called.
"""
