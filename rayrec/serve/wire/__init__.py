"""What requests and answers look like, whatever the protocol: schemas, errors, callers, deadlines.

Start at `schemas`.
May import `config`.
"""
