"""`python -m equipoise.peer.cli`."""

from equipoise.peer.cli.program import main

if __name__ == "__main__":
    main()
