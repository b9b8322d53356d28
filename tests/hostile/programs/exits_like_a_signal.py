# Exits with the status that shells give to a killed program.
# walls: none
# status: 137
import sys

sys.exit(137)
