"""Ranking as programs of fixed shapes, compiled by another process and loaded without tracing.

    batch ─► Bucket ─► padded inputs ─► program of that bucket, or None: the caller ranks eagerly, at once
                └ unknown: ordered (a callback; see `rayrec.serve.engine.compilation`)

    compiler_process: Job ─► export, AOTInductor ─► compared with eager ─► KEY.pt2, KEY.json

A program holds no weights: they are inputs, so that it serves every version of a model of its shapes. What
it does hold is the trie of the catalog, and with it settings, sources, torch and the processor are in a
package's key.
"""
