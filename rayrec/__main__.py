"""`python -m rayrec`: the `rayrec` command."""

from rayrec.cli import main

main()
