"""`python -m kvferry`."""

from kvferry.cli import main

main()
