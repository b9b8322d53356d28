"""`python -m lockstep <command>`, also under `accelerate launch -m lockstep train ...`."""

from lockstep.command import main

if __name__ == "__main__":
    main()
