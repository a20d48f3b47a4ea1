"""`python -m rather` is the command `rather`."""

from rather.cli import main

main()
