"""The service over gRPC: the same admission, batcher and answers as over HTTP.

Start at `service.RpcService`.
May import `web` and what is below it.
"""
