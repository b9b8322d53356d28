# Prints without end, on both outputs.
# walls: none
# ended: timeout
import os

while True:
    os.write(1, b"x" * 65536)
    os.write(2, b"x" * 65536)
