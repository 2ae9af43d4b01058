"""`python -m secateurs`, and `torchrun -m secateurs`."""

from secateurs.cli import main

if __name__ == "__main__":
    main()
