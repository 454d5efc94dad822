"""`python -m equipoise`: the command line."""

from equipoise.peer.cli import main

if __name__ == "__main__":
    main()
