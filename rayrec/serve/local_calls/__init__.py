"""Calls between processes of a node, over Unix domain sockets: listeners, connections, and a choice of peers.

Knows nothing of Ray. Use `Listener` where calls are answered, `Peers` where they are made. Imports nothing of
this room."""
